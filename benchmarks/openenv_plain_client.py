"""The plain OpenEnv client at its own pace, for a Python that has `openenv`: ``python openenv_plain_client.py URL SESSIONS``.

Connects, prints ``ready``, and for each number of seconds that it reads prints the steps per second it made meanwhile.
`openenv_steps.py` runs it beside fleetbus's adapter.
"""

import asyncio
import sys
import time
from typing import Any


async def main(url: str, sessions: int) -> None:
    from openenv.core.generic_client import GenericEnvClient

    clients = [GenericEnvClient(base_url=url) for _ in range(sessions)]
    for client in clients:
        await client.connect()
        await client.reset()
    print("ready", flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        print(await measure_rate(clients, float(line)), flush=True)
    for client in clients:
        await client.close()


async def measure_rate(clients: list[Any], seconds: float) -> float:
    steps = 0
    started = time.perf_counter()

    async def play(client: Any) -> None:
        nonlocal steps
        while time.perf_counter() < started + seconds:
            await client.step({"message": "hello"})
            steps += 1

    await asyncio.gather(*map(play, clients))
    return steps / (time.perf_counter() - started)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2])))
