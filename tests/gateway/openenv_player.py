"""Plays one episode with the real OpenEnv client: `openenv_player.py URL`. Run by a Python that has `openenv`."""

from __future__ import annotations

import asyncio
import json
import sys

from openenv.core.generic_client import GenericEnvClient


async def main(url: str) -> None:
    async with GenericEnvClient(base_url=url) as client:
        told = await client.reset(seed=7, prompt="Add to")
        seen = [[told.observation["text"], told.reward, told.done]]
        for text in ("one", "two", "three"):
            told = await client.step({"text": text})
            seen.append([told.observation["text"], told.reward, told.done])
        state = await client.state()
        print(json.dumps({"seen": seen, "steps": state["step_count"]}))


asyncio.run(main(sys.argv[1]))
