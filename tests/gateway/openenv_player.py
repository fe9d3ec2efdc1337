"""The real OpenEnv client at work: `openenv_player.py URL play|defects|wait`. Run by a Python that has `openenv`."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from openenv.core.generic_client import GenericEnvClient


async def play(client: GenericEnvClient) -> dict[str, Any]:
    """One episode of three steps."""
    told = await client.reset(seed=7, prompt="Add to")
    seen = [[told.observation["text"], told.reward, told.done]]
    for text in ("one", "two", "three"):
        told = await client.step({"text": text})
        seen.append([told.observation["text"], told.reward, told.done])
    return {"seen": seen, "steps": (await client.state())["step_count"]}


async def defects(client: GenericEnvClient) -> dict[str, Any]:
    """What its own servers let pass or die of, and whether the session still knows its steps afterwards."""
    told: dict[str, Any] = {"early": await refused(client.step({"text": "early"}))}
    started = await client.reset(seed=1)
    told["metadata"] = started.metadata
    await client.step({"text": "one"})
    told["bad action"] = await refused(client.step({"wrong": 1}))
    await asyncio.sleep(6)  # longer than its servers' idle limit in their own tests: an open session is not idle
    await client.step({"text": "two"})
    told["steps"] = (await client.state())["step_count"]
    told["not a number"] = await refused(client.step({"text": "nan"}))
    return told


async def refused(call: Any) -> str:
    try:
        await call
    except RuntimeError as error:
        return str(error)
    return ""


async def wait(client: GenericEnvClient) -> dict[str, Any]:
    await client.reset()
    print("begun", flush=True)
    await asyncio.sleep(600)
    return {}


async def main(url: str, what: str) -> None:
    async with GenericEnvClient(base_url=url) as client:
        print(json.dumps(await {"play": play, "defects": defects, "wait": wait}[what](client)))


asyncio.run(main(*sys.argv[1:3]))
