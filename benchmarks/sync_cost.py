"""Measures the cost of each setting of ``nats.sync``: publishes that are waited for one by one, and a hundred at a time.

    TMPDIR=DISK python benchmarks/sync_cost.py

One line per setting: seconds until an acked entry is on the disk (0: before the ack), median and 99th percentile of one
publish in milliseconds, publishes per second with 100 under way. TMPDIR names the disk.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path

import anyio

from fleetbus.bus.nats import connect
from fleetbus.bus.nats.server import run_server
from fleetbus.bus.streams import plan_run
from fleetbus_schemas import Subjects

SETTINGS = (120.0, 10.0, 1.0, 0.1, 0.0)
SINGLE, TOGETHER, AT_A_TIME = 300, 3000, 100
PAYLOAD = bytes(1200)
S = Subjects("sync")


async def measure(sync_seconds: float) -> str:
    """The line of one setting."""
    with tempfile.TemporaryDirectory() as folder:
        async with run_server(Path(folder), sync_seconds=sync_seconds) as server, connect(server.url, run="sync") as bus:
            await bus.declare(plan_run("sync", lanes=1))
            times = []
            for number in range(SINGLE):
                started = time.perf_counter()
                await bus.publish(S.session(f"s{number}"), PAYLOAD)
                times.append((time.perf_counter() - started) * 1e3)
            limiter = anyio.CapacityLimiter(AT_A_TIME)

            async def publish(number: int) -> None:
                async with limiter:
                    await bus.publish(S.session(f"t{number}"), PAYLOAD)

            started = time.perf_counter()
            async with anyio.create_task_group() as group:
                for number in range(TOGETHER):
                    group.start_soon(publish, number)
            rate = TOGETHER / (time.perf_counter() - started)
    times.sort()
    return f"{sync_seconds:>8g} {statistics.median(times):>10.2f} {times[int(SINGLE * 0.99)]:>10.2f} {rate:>12.0f}"


async def main() -> None:
    print(f"{'seconds':>8} {'median ms':>10} {'99 % ms':>10} {'100 at once':>12}")
    for seconds in SETTINGS:
        print(await measure(seconds), flush=True)


if __name__ == "__main__":
    anyio.run(main, backend_options={"use_uvloop": True})
