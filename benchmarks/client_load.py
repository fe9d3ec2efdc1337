"""Clients at their own pace, for a Python that has them: ``client_load.py openenv|vagen|fleetbus URL SESSIONS JSON``.

Connects, prints ``ready``, and for each number of seconds that it reads prints what it made meanwhile: steps, seconds, the
latency of each step, CPU seconds of its own. `gateway_peers.py` runs one beside a gateway and one beside the original server.
``JSON`` has settings of the environment. VAGEN's client comes from the checkout that ``VAGEN_CHECKOUT`` names. ``fleetbus`` is
our own client of VAGEN's protocol, as environment workers use it; with ``decode`` in the settings it decodes pictures, too.
"""

import asyncio
import json
import os
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

ACTION = "x" * 200


@cache
def import_vagen() -> Any:
    """Its package for remote environments. The packages around it need a trainer: their folders stand in for them."""
    for name in ("vagen", "vagen.envs"):
        module = ModuleType(name)
        module.__path__ = [str(Path(os.environ["VAGEN_CHECKOUT"]).joinpath(*name.split(".")))]
        sys.modules[name] = module
    import vagen.envs_remote

    return vagen.envs_remote


async def open_openenv(url, number, settings):
    from openenv.core.generic_client import GenericEnvClient

    client = GenericEnvClient(base_url=url)
    await client.connect()
    await client.reset(seed=number, **settings)
    return lambda: client.step({"text": ACTION}), client.close


async def open_vagen(url, number, settings):
    client = import_vagen().GymImageEnvClient({"base_urls": url, "retries": 0, **settings})
    await client.reset(seed=number)
    return lambda: client.step(ACTION), client.close


async def open_fleetbus(url, number, settings):
    from fleetbus_workers.environment.adapters.remote_gym.client import connect
    from fleetbus_workers.environment.adapters.remote_gym.config import RemoteGymConfig

    decode = settings.pop("decode", False)
    session, _ = await connect(await enter_pool(), RemoteGymConfig(base_urls=(url,)), settings, number)

    async def step():
        answer = await session.call("step", {"action_str": ACTION})
        return [await asyncio.to_thread(decode_picture, each) for each in answer.images] if decode else answer

    return step, session.close


OPEN = []
"""The pool of all sessions, and what holds it open until the process ends."""


async def enter_pool():
    from fleetbus_workers.environment.adapters.remote_gym.client import ServerPool

    if not OPEN:
        pool = ServerPool()
        OPEN[:] = pool, pool.run()
        await OPEN[1].__aenter__()
    return OPEN[0]


def decode_picture(data):
    import io

    from PIL import Image

    return Image.open(io.BytesIO(data)).convert("RGBA")


async def main(kind: str, url: str, sessions: int, settings: dict) -> None:
    opening = {"openenv": open_openenv, "vagen": open_vagen, "fleetbus": open_fleetbus}[kind]
    opened = [await opening(url, number, dict(settings)) for number in range(sessions)]
    print("ready", flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        print(json.dumps(await measure([step for step, _ in opened], float(line))), flush=True)
    for _, close in opened:
        await close()


async def measure(steps: Sequence[Callable[[], Awaitable[object]]], seconds: float) -> dict[str, float | list[float]]:
    latencies: list[float] = []
    started, used = time.perf_counter(), time.process_time()

    async def play(step: Callable[[], Awaitable[object]]) -> None:
        while (begun := time.perf_counter()) < started + seconds:
            await step()
            latencies.append(time.perf_counter() - begun)

    await asyncio.gather(*map(play, steps))
    passed = time.perf_counter() - started
    return {"seconds": passed, "cpu": time.process_time() - used, "latencies": latencies}


if __name__ == "__main__":
    work = main(sys.argv[1], sys.argv[2], int(sys.argv[3]), json.loads(sys.argv[4]))
    if sys.argv[1] == "fleetbus":
        import uvloop  # as our workers run it

        uvloop.run(work)
    else:
        asyncio.run(work)
