"""VAGEN's own client under faults, for a Python that has httpx and Pillow: ``play_vagen.py FACTS``; see `test_kills.py`.

The client comes out of the checkout of VAGEN that ``VAGEN_CHECKOUT`` names, without the rest of that package.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any


def load_client(checkout: Path) -> Any:
    """The class. The packages around it need a trainer and GPUs, so that they are stood in for by their folders."""
    for name in ("vagen", "vagen.envs"):
        module = ModuleType(name)
        module.__path__ = [str(checkout.joinpath(*name.split(".")))]
        sys.modules[name] = module
    from vagen.envs_remote import GymImageEnvClient

    return GymImageEnvClient


async def play(client: Any, steps: int) -> dict[str, Any]:
    await client.reset(seed=1)
    session = client._session_id
    told = []
    for number in range(1, steps + 1):
        observation, reward, done, _ = await client.step(f"step {number}")
        told.append([observation["obs_str"], reward, done])
    await client.close()
    return {"session": session, "told": told, "count": steps}


async def main(facts: dict[str, Any]) -> None:
    client_class = load_client(Path(os.environ["VAGEN_CHECKOUT"]))
    numbers, enough = itertools.count(), Path(facts["enough"])
    waiting = {"retries": 300, "backoff_jitter_min": 1.0, "backoff_jitter_range": 0.0, "log_retries": False}

    async def play_on() -> None:
        while next(numbers) < facts["episodes"] or not enough.exists():  # noqa: ASYNC240 - a file beside the test
            client = client_class({"base_urls": facts["url"], "steps": facts["steps"], **waiting})
            client.backoff = Steady(0.1)
            print(json.dumps(await play(client, facts["steps"])), flush=True)

    await asyncio.gather(*(play_on() for _ in range(facts["parallel"])))


class Steady(float):
    """A wait that is not doubled with each retry, so that a test does not wait for minutes."""

    def __mul__(self, other: float) -> float:
        return float(self)


asyncio.run(main(json.loads(sys.argv[1])))
