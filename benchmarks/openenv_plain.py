"""The plain OpenEnv client at its own pace, for a Python that has `openenv`: ``python openenv_plain.py URL SESSIONS SECONDS``.

Prints steps per second. `openenv_steps.py` runs it beside fleetbus's adapter.
"""

import asyncio
import sys
import time


async def main(url: str, sessions: int, seconds: float) -> float:
    from openenv.core.generic_client import GenericEnvClient

    clients = [GenericEnvClient(base_url=url) for _ in range(sessions)]
    for client in clients:
        await client.connect()
        await client.reset()
    steps = 0
    started = time.perf_counter()

    async def play(client: GenericEnvClient) -> None:
        nonlocal steps
        while time.perf_counter() < started + seconds:
            await client.step({"message": "hello"})
            steps += 1

    await asyncio.gather(*map(play, clients))
    elapsed = time.perf_counter() - started
    for client in clients:
        await client.close()
    return steps / elapsed


if __name__ == "__main__":
    print(asyncio.run(main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]))))
