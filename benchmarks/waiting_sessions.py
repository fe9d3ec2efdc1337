"""Measures episodes that only wait: memory per session in one environment worker, and if its heartbeats still come.

    python benchmarks/waiting_sessions.py --json
    python benchmarks/waiting_sessions.py --json --workers 200 --sessions 20000     # a fleet, as tasks of one process

A real server, a real environment worker in a process of its own with a trivial environment, and nobody who answers. Every
session has opened and reset its environment, has published its observation and waits; the worker extends the leases of all
requests and looks for late actions all the time. ``kib_per_session`` is the resident memory of the worker beyond what it had
idle, by session. A heartbeat is missed when none came for twice its interval; of several workers each has its own.
``begun_seconds``: from the first request until the observation of every session is in the log.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import anyio
import msgspec
import psutil
import structlog
import uvloop

from benchmarks.load_plan import temporary_server
from fleetbus.bus.base import Bus
from fleetbus.bus.nats import connect
from fleetbus.bus.streams import plan_run
from fleetbus.config.settings import Configuration, EnvironmentSettings, NatsSettings, RunSettings
from fleetbus.delivery.heartbeats import HEARTBEAT_SECONDS
from fleetbus_schemas import EpisodeRequested, Subjects, Task, encode
from fleetbus_workers.environment.adapters.scripted import ScriptedEnvironment

RUN = "waiting"
NAME = "environment"
MOST_KIB = 12.0
BETWEEN_SECONDS = 0.02
"""From the start of one worker to that of the next: one process cannot open a thousand connections within a connection's time
limit."""

SECONDS_TO_START = 300
SECONDS_TO_BEGIN = 300


class Waiting(msgspec.Struct, frozen=True, kw_only=True):
    """What was measured over ``seconds`` with all sessions waiting. Memory in MiB, but for ``kib_per_session``. Shares
    are of one core."""

    sessions: int
    workers: int
    idle_mib: float
    waiting_mib: float
    begun_seconds: float
    kib_per_session: float
    seconds: float
    heartbeats: int
    missed_heartbeats: int
    longest_gap_seconds: float
    cpu_share: float
    server_cpu_share: float

    @property
    def holds(self) -> bool:
        return self.kib_per_session <= MOST_KIB and not self.missed_heartbeats


async def serve(url: str, sessions: int, workers: int) -> None:
    """The process of the workers, until it is killed. Each has a connection and its share of the sessions."""
    from fleetbus_workers.cli.roles.role import tune_collector
    from fleetbus_workers.environment.worker import run_environment

    tune_collector()  # with Python's thresholds the collector looks at all sessions again and again: half of the processor time
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(40))
    configuration = Configuration(
        run=RunSettings(name=RUN),
        nats=NatsSettings(lanes=workers + 1),
        environment=EnvironmentSettings(slots=-(-sessions // workers)),
    )

    async def work(name: str) -> None:
        async with connect(url, run=RUN, role="environment", worker=name) as bus:
            await run_environment(bus, configuration=configuration, name=name, drain=anyio.Event(), make=ScriptedEnvironment)

    async with anyio.create_task_group() as tasks:
        for index in range(workers):
            tasks.start_soon(work, f"{NAME}{index}")
            await anyio.sleep(BETWEEN_SECONDS)


@asynccontextmanager
async def worker_process(url: str, sessions: int, workers: int) -> AsyncIterator[psutil.Process]:
    sizes = ["--sessions", str(sessions), "--workers", str(workers)]
    process = subprocess.Popen([sys.executable, __file__, "--serve", "--url", url, *sizes])
    try:
        yield psutil.Process(process.pid)
    finally:
        process.kill()
        process.wait()


def read_cpu_seconds(process: psutil.Process) -> float:
    """What a process has used of all cores so far."""
    return sum(process.cpu_times()[:2])


def find_server() -> psutil.Process:
    """The nats-server that this process started."""
    return next(each for each in psutil.Process().children(recursive=True) if each.name() == "nats-server")


async def measure(url: str, *, sessions: int, seconds: float, workers: int = 1) -> Waiting:
    """Workers in one process, idle and then with ``sessions`` waiting for ``seconds``; the server is one of this process."""
    server = find_server()
    subjects = Subjects(RUN)
    async with connect(url, run=RUN, role="test", worker="driver") as bus:
        await bus.declare(plan_run(RUN, lanes=workers + 1, max_bytes=2 << 30))
        async with (
            bus.listen(subjects.heartbeat("environment", "*")) as heartbeats,
            worker_process(url, sessions, workers) as process,
        ):
            heard: Counter[str] = Counter()
            with anyio.fail_after(SECONDS_TO_START):
                while len(heard) < workers or min(heard.values()) < 3:  # by the second one everything is set up
                    heard[(await heartbeats.receive())[0]] += 1
            idle = process.memory_info().rss
            asked = anyio.current_time()
            await begin(bus, subjects, sessions)
            cpu, server_cpu = read_cpu_seconds(process), read_cpu_seconds(server)
            peak, begun = process.memory_info().rss, anyio.current_time()
            came = {subject: [begun] for subject in heard}
            with anyio.move_on_after(seconds):
                while True:
                    subject, _ = await heartbeats.receive()
                    came[subject].append(anyio.current_time())
                    peak = max(peak, process.memory_info().rss)
            ended = anyio.current_time()
            cpu, server_cpu = read_cpu_seconds(process) - cpu, read_cpu_seconds(server) - server_cpu
    gaps = [later - earlier for times in came.values() for earlier, later in pairwise([*times, ended])]
    return Waiting(
        sessions=sessions,
        workers=workers,
        idle_mib=round(idle / 2**20, 1),
        waiting_mib=round(peak / 2**20, 1),
        begun_seconds=round(begun - asked, 1),
        kib_per_session=round((peak - idle) / 1024 / sessions, 1),
        seconds=seconds,
        heartbeats=sum(len(times) - 1 for times in came.values()),
        missed_heartbeats=sum(int(gap / HEARTBEAT_SECONDS) - 1 for gap in gaps if gap >= 2 * HEARTBEAT_SECONDS),
        longest_gap_seconds=round(max(gaps), 2),
        cpu_share=round(cpu / seconds, 3),
        server_cpu_share=round(server_cpu / seconds, 3),
    )


async def begin(bus: Bus, subjects: Subjects, sessions: int) -> None:
    """Ask for the episodes and return when the observation of each is in the log."""
    start = (await bus.log_state()).last_sequence + 1
    async with bus.read([subjects.observations()], start=start) as reader, anyio.create_task_group() as group:
        limiter = anyio.CapacityLimiter(64)
        for index in range(sessions):
            group.start_soon(request, bus, subjects, f"w{index:05d}", limiter)
        seen: set[str] = set()
        with anyio.move_on_after(SECONDS_TO_BEGIN) as scope:
            while len(seen) < sessions:
                seen.add((await reader.receive()).subject.rpartition(".")[2])
        if scope.cancelled_caught:
            raise SystemExit(f"{len(seen)} of {sessions} sessions had begun after {SECONDS_TO_BEGIN} s")


async def request(bus: Bus, subjects: Subjects, episode: str, limiter: anyio.CapacityLimiter) -> None:
    message = EpisodeRequested(
        episode_id=episode,
        group_id="g",
        sample_index=0,
        split="train",
        task=Task(key="task", prompt="wait"),
        policy="default",
        deadline_ns=bus.now_ns() + 3600 * 10**9,
    )
    async with limiter:
        await bus.publish(subjects.task("default", episode), encode(message), expected_last=0)


async def run(sessions: int, seconds: float, workers: int) -> Waiting:
    async with temporary_server() as url:
        return await measure(url, sessions=sessions, seconds=seconds, workers=workers)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=30.0, help="how long all of them wait")
    parser.add_argument("--workers", type=int, default=1, help="environment workers that share the sessions")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--url", default="", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        uvloop.run(serve(arguments.url, arguments.sessions, arguments.workers))
        return 0
    measured = uvloop.run(run(arguments.sessions, arguments.seconds, arguments.workers))
    if arguments.json:
        print(json.dumps(msgspec.structs.asdict(measured)))
    else:
        print(f"{measured.sessions} sessions wait in {measured.waiting_mib} MiB (idle {measured.idle_mib} MiB):")
        print(f"  {measured.kib_per_session} KiB each; at most {MOST_KIB} are wanted")
        print(f"  all had begun after {measured.begun_seconds} s")
        print(f"  {measured.missed_heartbeats} of {measured.heartbeats} heartbeats missed, {measured.cpu_share:.0%} of a core")
        print(f"  nats-server: {measured.server_cpu_share:.0%} of a core")
    return 0 if measured.holds else 1


if __name__ == "__main__":
    sys.exit(main())
