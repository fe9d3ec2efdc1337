"""Computes the rewards of the package `verifiers` itself: ``python original_rewards.py NAME EPISODES [all]``, in its
interpreter.

EPISODES is a file, ``[[INDEX, [ANSWER, ...]], ...]``; an answer is a text or a list of calls, ``[NAME, ARGUMENTS]``. Prints
a list of rewards, with ``all`` of each role by name, null where the package recorded an error. It loads, serves and runs as the
package's own evaluation does, against a server of its own. Nothing of fleetbus is imported.
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
NULL = {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}
V1: dict[str, dict[str, Any]] = {
    "scratchpad": {"agent": NULL},
    "kuhn_poker": {"player0": NULL, "player1": NULL},
    "proposer_solver": {"proposer": NULL, "solver": NULL, "n": 2},
}
ROLES = {"scratchpad": "agent", "kuhn_poker": "player0", "proposer_solver": "solver"}


class Model(BaseHTTPRequestHandler):
    """Answers ``/NUMBER/v1/chat/completions`` with the next answer of that episode."""

    episodes: list[list[Any]]

    def log_message(self, *arguments: Any) -> None: ...

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        answers = self.episodes[int(self.path.split("/")[1])][1]
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


async def play_v1(name: str, episodes: list[list[Any]], url: str) -> list[Any]:
    import verifiers.v1 as vf
    from verifiers.v1.utils.loaders import load_environment, resolve_env_config

    environment = load_environment(resolve_env_config({"taskset": {"id": name}, **V1[name]}))
    tasks = list(itertools.islice(iter(environment.taskset), max(index for index, _ in episodes) + 1))
    gate = asyncio.Semaphore(AT_A_TIME)

    async def play(number: int) -> Any:
        client = vf.EvalClientConfig(base_url=f"{url}/{number}/v1", api_key_var="NO_KEY")
        slot = environment.slots(tasks[episodes[number][0]])[0]
        episode = await environment.run_slot(slot, vf.ModelContext(model="m", client=client), gate)
        rewards: dict[str, list[float]] = {}
        for trace in episode.traces:
            rewards.setdefault(trace.agent.name, []).append(trace.reward)
        means = {role: sum(values) / len(values) for role, values in rewards.items()}
        if not episode.ok:
            return None
        return means if sys.argv[3:] else means[ROLES[name]]

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
    Model.episodes = episodes
    server = ThreadingHTTPServer(("127.0.0.1", 0), Model)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    is_v0 = hasattr(importlib.import_module(name), "load_environment")
    rewards = asyncio.run((play_v0 if is_v0 else play_v1)(name, episodes, f"http://127.0.0.1:{server.server_port}"))
    print(json.dumps(rewards))


if __name__ == "__main__":
    main()
