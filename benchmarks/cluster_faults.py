"""Measures faults of a run's servers: one server and three, an election, a follower that hangs, links of 80 ms.

    python benchmarks/cluster_faults.py --json

A real environment worker and a real inference worker in this process, whose environments and samplers answer at once, play 64
episodes of 5 turns at a time. Before the fault and during it: steps per second (turns of episodes that have a result), the
longest time without any result, and after how many seconds half of the rate was back. ``failed`` are results other than
`completed` of the whole case; every case is audited.

``leader killed``: SIGKILL to the server that leads the log. ``follower stopped``: SIGSTOP to one that does not, as if its
network were cut. ``workers behind 80 ms``: both workers' connections go through a proxy that holds all bytes for 40 ms in each
direction. ``leaf behind 80 ms``: both workers use a leaf node of their own, whose connection to the log's server does.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import count, pairwise
from pathlib import Path
from typing import Any, cast

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import anyio
import anyio.abc
import structlog
import uvloop

from fleetbus.audit.run import audit_run
from fleetbus.bus.base import Bus
from fleetbus.bus.nats import connect
from fleetbus.bus.nats.server import find_server, run_server
from fleetbus.bus.streams import plan_run
from fleetbus.config.settings import Configuration, EnvironmentSettings, InferenceSettings, RunSettings
from fleetbus.errors import BusError, UserError
from fleetbus.log.episodes import decode_episode_entry
from fleetbus_schemas import EpisodeFinished, EpisodeRequested, PolicyPublished, Subjects, Task, encode
from fleetbus_workers.environment.adapters.scripted import ScriptedEnvironment
from fleetbus_workers.environment.worker import run_environment
from fleetbus_workers.inference.scripted import ScriptedSampler, ScriptedTemplate
from fleetbus_workers.inference.worker import run_inference
from tests.support.cluster import cluster, declare_streams, find_leader
from tests.support.ports import free_ports
from tests.support.relay import Relay

RUN = "test"
SUBJECTS = Subjects(RUN)
SESSIONS = 64
TURNS = 5
ONE_WAY_SECONDS = 0.04
DURING = 3
"""Times as long as before the fault is what follows it watched."""

Fault = Callable[[], Awaitable[None]]


class Case:
    """Where workers connect, and what happens after a while."""

    def __init__(self, servers: str, workers: str = "", fault: Fault | None = None, mend: Fault | None = None) -> None:
        self.servers = servers
        self.workers = workers or servers
        self.fault = fault
        self.mend = mend


@asynccontextmanager
async def one_server() -> AsyncIterator[Case]:
    with tempfile.TemporaryDirectory() as folder:
        async with run_server(Path(folder)) as server:
            await declare(server.url)
            yield Case(server.url)


async def declare(url: str) -> None:
    async with connect(url, run=RUN, role="init") as bus:
        await bus.declare(plan_run(RUN, lanes=4, max_bytes=1 << 30))


@asynccontextmanager
async def three_servers(fault: str = "") -> AsyncIterator[Case]:
    with tempfile.TemporaryDirectory() as folder:
        async with cluster(Path(folder)) as servers:
            await declare_streams(servers, RUN)
            leader = await find_leader(servers, RUN)
            follower = (leader + 1) % 3

            async def kill_leader() -> None:
                await servers.kill(leader)

            async def stop_follower() -> None:
                servers.processes[follower].send_signal(signal.SIGSTOP)

            async def mend() -> None:
                if fault == "leader":
                    await servers.start(leader)
                else:
                    servers.processes[follower].send_signal(signal.SIGCONT)

            faults = {"leader": kill_leader, "follower": stop_follower}
            # connected to the third server, whose own clients notice nothing but the log
            beside = f"nats://127.0.0.1:{servers.clients[3 - leader - follower]}"
            yield Case(servers.url if fault != "follower" else beside, fault=faults.get(fault), mend=mend if fault else None)


@asynccontextmanager
async def slow_workers() -> AsyncIterator[Case]:
    async with one_server() as case, slow_link(int(case.servers.rpartition(":")[2])) as port:
        yield Case(case.servers, f"nats://127.0.0.1:{port}")


@asynccontextmanager
async def slow_leaf() -> AsyncIterator[Case]:
    """A leaf node without a store: its clients reach the log through its one connection to the server that has it."""
    with tempfile.TemporaryDirectory() as name:
        folder, (leaves, clients) = Path(name), free_ports(2)
        hub = folder / "hub.conf"
        hub.write_text(f"jetstream {{ domain: hub }}\nleafnodes {{ listen: 127.0.0.1:{leaves} }}\n")
        async with run_server(folder / "hub", config=hub) as server, slow_link(leaves) as link:
            await declare(server.url)
            leaf = folder / "leaf.conf"
            remote = f'leafnodes {{ remotes: [{{ url: "nats-leaf://127.0.0.1:{link}" }}] }}'
            leaf.write_text(f'listen: 127.0.0.1:{clients}\ndefault_js_domain: {{ "$G": "hub" }}\n{remote}\n')
            process = await anyio.open_process([str(find_server()), "-c", str(leaf), "-l", str(folder / "leaf.log")])
            try:
                await wait_until_joined(f"nats://127.0.0.1:{clients}")
                yield Case(server.url, f"nats://127.0.0.1:{clients}")
            finally:
                process.kill()
                await process.wait()


async def wait_until_joined(url: str) -> None:
    """Until the log can be reached there."""
    with anyio.fail_after(30):
        while True:
            try:
                async with connect(url, run=RUN, role="init"):
                    return
            except (BusError, UserError):
                await anyio.sleep(0.2)


@asynccontextmanager
async def slow_link(port: int) -> AsyncIterator[int]:
    """A port whose connections lead to another one, every byte later by `ONE_WAY_SECONDS` in either direction."""
    async with Relay(f"nats://127.0.0.1:{port}", one_way_seconds=ONE_WAY_SECONDS).running() as relay:
        yield int(relay.url.rpartition(":")[2])


async def play(bus: Bus, results: list[tuple[float, str]]) -> None:
    """Keep `SESSIONS` episodes under way, and write down when results came."""
    numbers = count()

    async def request() -> None:
        episode = f"e{next(numbers):06d}"
        message = EpisodeRequested(
            episode_id=episode, group_id=episode, sample_index=0, split="eval", task=Task(key="t", config={"turns": TURNS}),
            policy="default", max_turns=TURNS, max_tokens=1 << 20, deadline_ns=bus.now_ns() + 300 * 10**9,
        )  # fmt: skip
        await bus.publish(SUBJECTS.task("default", episode), encode(message), expected_last=0, timeout=120)

    async with bus.read([SUBJECTS.episodes]) as reader, anyio.create_task_group() as tasks:
        for _ in range(SESSIONS):
            tasks.start_soon(request)
        while True:
            entry = decode_episode_entry(await reader.receive())
            if isinstance(entry, EpisodeFinished):
                results.append((anyio.current_time(), entry.outcome))
                tasks.start_soon(request)


@asynccontextmanager
async def workers(url: str) -> AsyncIterator[None]:
    settings = Configuration(
        run=RunSettings(name=RUN),
        environment=EnvironmentSettings(slots=SESSIONS),
        inference=InferenceSettings(slots=2 * SESSIONS, max_model_len=1 << 20),
    )
    async with AsyncExitStack() as stack:
        near = await stack.enter_async_context(connect(url, run=RUN, role="environment", worker="e"))
        far = await stack.enter_async_context(connect(url, run=RUN, role="inference", worker="i"))
        tasks = await stack.enter_async_context(anyio.create_task_group())

        async def infer() -> None:
            sampler, template = ScriptedSampler(), ScriptedTemplate()
            await run_inference(far, configuration=settings, name="i", drain=anyio.Event(), sampler=sampler, template=template)

        async def step() -> None:
            await run_environment(near, configuration=settings, name="e", drain=anyio.Event(), make=ScriptedEnvironment)

        tasks.start_soon(infer)
        tasks.start_soon(step)
        yield
        tasks.cancel_scope.cancel()


async def measure(name: str, entered: Any, seconds: float) -> dict[str, Any]:
    results: list[tuple[float, str]] = []
    async with entered as case, connect(case.servers, run=RUN, role="up", worker="driver") as bus:
        policy = PolicyPublished(policy="default", version=0, lineage="l1", step=0, uri="", manifest=(), size_bytes=0)
        await bus.publish(SUBJECTS.policy("default"), encode(policy))
        async with workers(case.workers), anyio.create_task_group() as tasks:
            tasks.start_soon(play, bus, results)
            with anyio.fail_after(60):
                while len(results) < 2 * SESSIONS:  # noqa: ASYNC110 - until it runs
                    await anyio.sleep(0.1)
            row: dict[str, Any] = {"case": name} | await watch(results, seconds, "")
            if case.fault is not None:
                await case.fault()
                struck = anyio.current_time()
                row |= await watch(results, DURING * seconds, "_during")
                half = cast(float, row["steps_per_second"]) / 2
                row["seconds_until_half"] = find_recovery(results, struck, half)
                assert case.mend is not None
                await case.mend()
            tasks.cancel_scope.cancel()
        report = await audit_run(bus, SUBJECTS)
    findings = [finding.kind for finding in report.findings if finding.kind != "unfinished"]
    return row | {"failed": sum(outcome != "completed" for _, outcome in results), "audit": findings or "balances"}


def find_recovery(results: list[tuple[float, str]], struck: float, rate: float) -> float | None:
    """Seconds from the fault until so many steps were made in a second, and from then on in the mean; None: not by now."""
    times = [at - struck for at, _ in results if at > struck]
    end = anyio.current_time() - struck
    for start in range(int(end) - 1):
        first, rest = (sum(start <= at < until for at in times) * TURNS for until in (start + 1, end))
        if first >= rate and rest >= rate * (end - start):
            return start
    return None


async def watch(results: list[tuple[float, str]], seconds: float, suffix: str) -> dict[str, float]:
    """Steps per second from now on, and the longest time without a result."""
    begun, before = anyio.current_time(), len(results)
    await anyio.sleep(seconds)
    times = [begun, *(at for at, _ in results[before:]), anyio.current_time()]
    steps = (len(results) - before) * TURNS
    longest = max(later - earlier for earlier, later in pairwise(times))
    return {f"steps_per_second{suffix}": round(steps / seconds, 1), f"longest_gap{suffix}": round(longest, 2)}


CASES: dict[str, Callable[[], Any]] = {
    "one server": one_server,
    "three servers": three_servers,
    "three servers, leader killed": lambda: three_servers("leader"),
    "three servers, follower stopped": lambda: three_servers("follower"),
    "workers behind 80 ms": slow_workers,
    "leaf behind 80 ms": slow_leaf,
}


async def main(only: str, seconds: float, as_json: bool) -> None:
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(50))
    for name, enter in CASES.items():
        if only in name:
            row = await measure(name, enter(), seconds)
            print(json.dumps(row) if as_json else "  ".join(f"{key} {value}" for key, value in row.items()), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="cases whose name has this in it")
    parser.add_argument("--seconds", type=float, default=10.0, help="before the fault; three times as long during it")
    parser.add_argument("--json", action="store_true", help="one JSON object per line")
    options = parser.parse_args()
    uvloop.run(main(options.only, options.seconds, options.json))
