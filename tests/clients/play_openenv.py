"""OpenEnv's own client under faults, for a Python that has `openenv`: ``play_openenv.py FACTS``; see `test_kills.py`.

A call that raises is made again under its ``request_id``, as a trainer would: its server may have executed it.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
from pathlib import Path
from typing import Any

from openenv.core.generic_client import GenericEnvClient

RETRY_SECONDS = 0.1


async def play(url: str, name: str, steps: int) -> dict[str, Any]:
    client = GenericEnvClient(base_url=f"{url}/sessions/{name}")

    async def persist(call: Any) -> Any:
        while True:
            try:
                return await call()
            except Exception as error:
                if "Server error" in str(error) and "reset first" in str(error):
                    raise
                await asyncio.sleep(RETRY_SECONDS)

    await persist(lambda: client.reset(seed=1, steps=steps))
    told = []
    for number in range(1, steps + 1):
        action = {"text": f"step {number}", "metadata": {"request_id": f"r{number}"}}
        result = await persist(lambda action=action: client.step(action))
        told.append([result.observation["text"], result.reward, result.done])
    count = (await persist(client.state))["step_count"]
    await client.close()
    return {"session": f"{name}-0", "told": told, "count": count}


async def main(facts: dict[str, Any]) -> None:
    numbers, enough = itertools.count(), Path(facts["enough"])

    async def play_on() -> None:
        while (number := next(numbers)) < facts["episodes"] or not enough.exists():  # noqa: ASYNC240 - a file beside the test
            print(json.dumps(await play(facts["url"], f"trial{number}", facts["steps"])), flush=True)

    await asyncio.gather(*(play_on() for _ in range(facts["parallel"])))


asyncio.run(main(json.loads(sys.argv[1])))
