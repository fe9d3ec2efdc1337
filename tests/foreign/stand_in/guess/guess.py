"""An environment as v0 has them: asks as often as its row says; the reward is the share of answers that are right."""

from __future__ import annotations

import asyncio
import json
import os
import time
import urllib.request
from typing import Any

ENDS = {
    "alpha": "", "bravo": "error", "charlie": "raise", "delta": "exit", "echo": "hang", "foxtrot": "block", "golf": "garble",
    "hotel": "flood",
}  # fmt: skip
ROWS = [{"prompt": [{"role": "user", "content": f"Say {word}."}], "answer": word, "then": then} for word, then in ENDS.items()]


def load_environment(turns: int = 2, reward: float = 1.0, other: bool = False, broken: str = "") -> Guess:
    if broken:
        raise ValueError(broken)
    return Guess(turns, reward, other)


class Guess:
    def __init__(self, turns: int, reward: float, other: bool) -> None:
        self._turns, self._reward, self._other = turns, reward, other

    def get_dataset(self) -> list[dict[str, Any]]:
        return ROWS

    async def run_rollout(self, row: dict[str, Any], client: Any, model: str, sampling: dict[str, Any]) -> dict[str, Any]:
        messages = [*row["prompt"]]
        right = 0
        for turn in range(self._turns):
            asked = "policy:untrained" if self._other and turn else model
            answer = await asyncio.to_thread(ask, client.url, asked, messages)
            right += answer["content"] == row["answer"]
            messages += [answer, {"role": "user", "content": "Again."}]
            if row["then"] == "error":
                return {"reward": 0.0, "error": {"error": "ToolError"}, "error_chain": "ToolError -> it broke"}
            if row["then"] == "raise":
                raise RuntimeError("no such luck")
            if row["then"] == "exit":
                print("Segmentation fault", flush=True)
                os._exit(3)
            if row["then"] == "garble":
                await asyncio.to_thread(write_reply, b"no reply\n")
                await asyncio.sleep(3600)  # what it asked next could come first
            if row["then"] == "flood":
                await asyncio.to_thread(write_reply, b"x" * (1 << 26))
            if row["then"] == "hang":
                await asyncio.sleep(3600)
            if row["then"] == "block":
                time.sleep(3600)  # noqa: ASYNC251  # as environments do that forget the loop
        return {"reward": self._reward * right / self._turns, "error": None}


def write_reply(content: bytes) -> None:
    """Write into the runner's own pipe, as a package that closes or copies descriptors may."""
    links = {number: os.path.realpath(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd")}
    pipe = next(int(number) for number, link in links.items() if "replies" in link)
    while content:
        content = content[os.write(pipe, content) :]


def ask(url: str, model: str, messages: list[dict[str, Any]]) -> dict[str, Any]:
    body = json.dumps({"model": model, "messages": messages}).encode()
    request = urllib.request.Request(f"{url}/chat/completions", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)["choices"][0]["message"]  # type: ignore[no-any-return]
