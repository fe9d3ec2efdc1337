"""Measures the cost of held leases: CPU per extension of a held request, and of all requests held at once, with one and
three servers.

    python benchmarks/lease_cost.py --held 2000

An environment worker extends each request that it holds four times per lease (2.5 s). One line per number of servers:
microseconds of all servers' CPU per extension, the share of one core that a thousand held requests take, and how long one round
of all extensions took until the last was applied.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import anyio
import psutil

from fleetbus.bus.base import Delivery
from fleetbus.bus.nats import connect
from fleetbus.bus.nats.server import run_server
from fleetbus.bus.streams import TASK_LEASE_SECONDS, plan_run, tasks_consumer
from fleetbus_schemas import Subjects
from tests.support.cluster import cluster, declare_streams

RUN = "test"
ROUNDS = 25
S = Subjects(RUN)


@asynccontextmanager
async def start_servers(count: int, folder: Path) -> AsyncIterator[tuple[str, list[psutil.Process]]]:
    """A url of that many servers with the run declared on them, and their processes."""
    async with AsyncExitStack() as stack:
        if count == 1:
            server = await stack.enter_async_context(run_server(folder))
            async with connect(server.url, run=RUN) as bus:
                await bus.declare(plan_run(RUN, lanes=1))
            yield server.url, [psutil.Process(server.pid)]
            return
        servers = await stack.enter_async_context(cluster(folder))
        await declare_streams(servers, RUN)
        yield servers.url, [psutil.Process(process.pid) for process in servers.processes.values()]


async def measure(count: int, held: int) -> str:
    with tempfile.TemporaryDirectory() as folder:
        async with start_servers(count, Path(folder)) as (url, processes), connect(url, run=RUN) as bus:
            for number in range(held):
                await bus.publish(S.task("default", f"e{number}"), bytes(600))
            async with bus.pull(tasks_consumer("default"), credits=held) as subscription:
                deliveries: list[Delivery] = [await subscription.receive() for _ in range(held)]
                await anyio.sleep(2)
                idle = read_cpu(processes)
                await anyio.sleep(2)
                idle = read_cpu(processes) - idle
                before, started = read_cpu(processes), time.monotonic()
                for _ in range(ROUNDS):
                    for delivery in deliveries:
                        await delivery.extend()
                    await bus.ack_floors()  # answered behind them
                seconds = time.monotonic() - started
                await anyio.sleep(2)
                used = read_cpu(processes) - before - idle * (seconds + 2) / 2
    each = used / (ROUNDS * held)
    per_thousand = each * 1000 * 4 / TASK_LEASE_SECONDS
    return f"{count:>7} {each * 1e6:>12.1f} {per_thousand * 100:>17.2f} {seconds / ROUNDS:>10.2f}"


def read_cpu(processes: list[psutil.Process]) -> float:
    """Seconds of CPU of all servers so far."""
    return sum(sum(process.cpu_times()[:2]) for process in processes)


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--held", type=int, default=1000)
    held = parser.parse_args().held
    print(f"{'servers':>7} {'us per lease':>12} {'% core per 1,000':>17} {'s a round':>10}   (load {os.getloadavg()[0]:.1f})")
    for count in (1, 3):
        print(await measure(count, held), flush=True)


if __name__ == "__main__":
    anyio.run(main)
