"""Computes the rewards of the package `verifiers` itself: ``python original_rewards.py NAME EPISODES [HARNESS]``, in its
interpreter.

EPISODES is a file, ``[[INDEX, [ANSWER, ...]], ...]``; an answer is a text or a list of calls, ``[NAME, ARGUMENTS]``. Prints
a list of rewards, of v1 those of each role by name, null where the package recorded an error, and how many answers each episode
took. It loads, serves and runs as the package's own evaluation does, against a server of its own, each role with HARNESS
(`null`). Nothing of fleetbus is imported.
"""

from __future__ import annotations

import asyncio
import importlib
import itertools
import json
import random
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

AT_A_TIME = 4
FIELDS: dict[str, dict[str, Any]] = {
    "scratchpad": {"agent": {}},
    "kuhn_poker": {"player0": {}, "player1": {}},
    "proposer_solver": {"proposer": {}, "solver": {}, "n": 2},
}
"""The roles of each environment of v1, and what else its configuration has."""


class Model(BaseHTTPRequestHandler):
    """Answers ``/NUMBER/v1/chat/completions`` with the next answer of that episode."""

    episodes: list[list[Any]]
    taken: list[int]

    def log_message(self, *arguments: Any) -> None: ...

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        number = int(self.path.split("/")[1])
        answers = self.episodes[number][1]
        self.taken[number] += 1
        message, finish = build_message(answers.pop(0) if answers else "done")
        head = {
            "id": "x",
            "created": 1,
            "model": body["model"],
            "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
        }
        if body.get("stream"):
            choice = {"index": 0, "delta": message, "finish_reason": finish}
            chunk = json.dumps({**head, "object": "chat.completion.chunk", "choices": [choice]})
            self.send("text/event-stream", f"data: {chunk}\n\ndata: [DONE]\n\n")
        else:
            choice = {"index": 0, "message": message, "finish_reason": finish, "logprobs": None}
            self.send("application/json", json.dumps({**head, "object": "chat.completion", "choices": [choice]}))

    def do_GET(self) -> None:
        self.send("application/json", '{"object": "list", "data": []}')

    def send(self, kind: str, text: str) -> None:
        self.send_response(200)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(text.encode())))
        self.end_headers()
        self.wfile.write(text.encode())


def build_message(answer: Any) -> tuple[dict[str, Any], str]:
    if isinstance(answer, str):
        return {"role": "assistant", "content": answer}, "stop"
    calls = [
        {
            "index": number,
            "id": f"c{number}",
            "type": "function",
            "function": {"name": name, "arguments": json.dumps(arguments)},
        }
        for number, (name, arguments) in enumerate(answer)
    ]
    return {"role": "assistant", "content": None, "tool_calls": calls}, "tool_calls"


async def play_v1(name: str, episodes: list[list[Any]], url: str, harness: str) -> list[dict[str, float] | None]:
    import verifiers.v1 as vf
    from verifiers.v1.utils.loaders import load_environment, resolve_env_config

    role = {"harness": {"id": harness}, "runtime": {"type": "subprocess"}}
    fields = {key: role if value == {} else value for key, value in FIELDS[name].items()}
    environment = load_environment(resolve_env_config({"taskset": {"id": name}, **fields}))
    tasks = list(itertools.islice(iter(environment.taskset), max(index for index, _ in episodes) + 1))
    gate = asyncio.Semaphore(AT_A_TIME)

    async def play(number: int) -> dict[str, float] | None:
        client = vf.EvalClientConfig(base_url=f"{url}/{number}/v1", api_key_var="NO_KEY")
        slot = environment.slots(tasks[episodes[number][0]])[0]
        episode = await environment.run_slot(slot, vf.ModelContext(model="m", client=client), gate)
        rewards: dict[str, list[float]] = {}
        for trace in episode.traces:
            rewards.setdefault(trace.agent.name, []).append(trace.reward)
        return {role: sum(values) / len(values) for role, values in rewards.items()} if episode.ok else None

    async with environment.serving():
        return list(await asyncio.gather(*map(play, range(len(episodes)))))


async def play_v0(name: str, episodes: list[list[Any]], url: str) -> list[float | None]:
    import verifiers as vf
    from verifiers.types import ClientConfig

    random.seed(0)
    environment = vf.load_environment(name)
    rows = environment.get_dataset()
    rewards: list[float | None] = []
    for number, (index, _) in enumerate(episodes):
        client = ClientConfig(api_base_url=f"{url}/{number}/v1", api_key_var="NO_KEY")
        outputs = (await environment.generate([dict(rows[index])], client, "m", {}))["outputs"]
        rewards.append(None if outputs[0].get("error") else outputs[0]["reward"])
    return rewards


def main() -> None:
    name, episodes = sys.argv[1], json.loads(Path(sys.argv[2]).read_text())
    Model.episodes, Model.taken = episodes, [0] * len(episodes)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Model)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}"
    if hasattr(importlib.import_module(name), "load_environment"):
        rewards: list[Any] = asyncio.run(play_v0(name, episodes, url))
    else:
        rewards = asyncio.run(play_v1(name, episodes, url, (*sys.argv[3:], "null")[0]))
    print(json.dumps([rewards, Model.taken]))


if __name__ == "__main__":
    main()
