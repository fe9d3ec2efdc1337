"""Agents in one process that play the sessions of two gateways, either of which may be gone at any time.

``python impatient_sessions.py AGENTS URL URL``: each agent keeps to one gateway while that answers, then turns to the other, as
a balancer would, and repeats its call as an SDK does. It hangs up on some of its calls. It says the id of every session that it
was given and, if it could not play it, why.
"""

from __future__ import annotations

import random
import sys
import uuid
from typing import Any

import anyio
import httpx

CALLS = 4
HANGS_UP = 0.3


class Agent:
    def __init__(self, http: httpx.AsyncClient, urls: list[str]) -> None:
        self._http = http
        self._urls = urls

    async def send(self, method: str, path: str, key: str = "", **options: Any) -> httpx.Response:
        """Repeated until a gateway answers it for good."""
        headers = {"Authorization": f"Bearer {key}"} if key else {"Idempotency-Key": uuid.uuid4().hex}
        hangs_up = bool(key) and random.random() < HANGS_UP
        retries = 0
        while True:
            try:
                marked = headers | {"x-stainless-retry-count": str(retries)}
                with anyio.move_on_after(random.random() * 0.1 if hangs_up else 90):
                    answer = await self._http.request(method, self._urls[0] + path, headers=marked, **options)
                    if answer.status_code not in (429, 503):
                        return answer
            except httpx.TransportError:
                self._urls.reverse()
                await anyio.sleep(0.2)
            hangs_up, retries = False, retries + 1

    async def play(self) -> None:
        while True:
            given = await self.send("GET", "/sessions/next?wait=10")
            if given.status_code != 200:
                continue
            session = given.json()
            try:
                await self._converse(session["id"], session["key"], session["reward_key"])
                print("played", session["id"], flush=True)
            except AssertionError as wrong:
                print("failed", session["id"], wrong, flush=True)

    async def _converse(self, episode: str, key: str, reward_key: str) -> None:
        messages: list[dict[str, str]] = []
        for number in range(CALLS):
            messages.append({"role": "user", "content": f"call {number}"})
            body = {"model": "policy", "messages": messages}
            answer = await self.send("POST", "/v1/chat/completions", key, json=body)
            assert answer.status_code == 200, answer.text
            messages.append({"role": "assistant", "content": answer.json()["choices"][0]["message"]["content"]})
        done = await self.send("POST", f"/sessions/{episode}/reward", reward_key, json={"reward": 1.0})
        assert done.status_code == 200, done.text


async def main() -> None:
    agents, urls = int(sys.argv[1]), sys.argv[2:]
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=agents)
    async with httpx.AsyncClient(timeout=120, limits=limits) as http, anyio.create_task_group() as group:
        for number in range(agents):
            group.start_soon(Agent(http, urls[number % 2 :] + urls[: number % 2]).play)


if __name__ == "__main__":
    anyio.run(main)
