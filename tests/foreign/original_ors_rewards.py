"""Computes rewards with the own client of `ors` or `openreward`: ``python original_ors_rewards.py PACKAGE URL EPISODES``.

EPISODES is a file, ``[[INDEX, [[TOOL, ARGUMENTS], ...]], ...]``. Prints a list with the rewards of each call, null where the
client raised. Nothing of fleetbus is imported.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

AT_A_TIME = 4


def connect(package: str, url: str) -> tuple[Any, Any]:
    """The client, which closes all when it is collected, and its environment `order`."""
    if package == "ors":
        from ors.client import AsyncORS

        client: Any = AsyncORS(base_url=url)
        return client, client.environment("order")
    os.environ["OPENREWARD_SESSION_URL"] = os.environ["OPENREWARD_API_URL"] = url
    from openreward import AsyncOpenReward

    client = AsyncOpenReward(api_key="none")
    return client, client.environments.get("order")


async def play(environment: Any, index: int, calls: list[Any]) -> list[float | None]:
    rewards: list[float | None] = []
    async with environment.session(split="train", index=index) as session:
        for name, arguments in calls:
            try:
                output = await session.call_tool(name, arguments)
            except Exception as error:
                print(repr(error), file=sys.stderr)
                rewards.append(None)
                continue
            rewards.append(output.reward)
            if output.finished:
                break
    return rewards


async def main(package: str, url: str, episodes: list[Any]) -> None:
    gate, (_client, environment) = asyncio.Semaphore(AT_A_TIME), connect(package, url)

    async def play_one(index: int, calls: list[Any]) -> list[float | None]:
        async with gate:
            return await play(environment, index, calls)

    print(json.dumps(await asyncio.gather(*(play_one(index, calls) for index, calls in episodes))))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], json.loads(Path(sys.argv[3]).read_text())))
