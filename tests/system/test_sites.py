"""Two sites whose environment workers reach a run with keys and TLS through a leaf node of their own, 80 ms away.

The commands of docs/cluster.md, "Sites of their own", on one machine: each site in a network namespace where this user may
make one. The learner and the inference worker are where the log is.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import anyio
import anyio.abc
import pytest

from fleetbus.audit.run import audit_run
from fleetbus.bus.base import Bus
from fleetbus.bus.streams import plan_run
from fleetbus.log.stored_entries import read_stored
from fleetbus_schemas import EpisodeFinished, StepTrained, Subjects, TrainingFinished
from tests.support.ports import free_ports
from tests.support.servers import RunningServers, running_servers
from tests.support.sites import Site, has_namespaces, running_site

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

SCRIPT = Path(__file__).with_name("rolling_role.py")
RUN = "sites"
S = Subjects(RUN)
ONE_WAY_SECONDS = 0.04
CUT_SECONDS = 20
STEPS = 24
SETTINGS = {
    "RUN_NAME": RUN, "NATS_LANES": "4", "LEARNER_STEPS": str(STEPS), "LEARNER_GROUPS": "2", "LEARNER_GROUP_SIZE": "4",
    "LEARNER_CHECKPOINT_EVERY": "10", "EVALUATION_EPISODES": "0", "ENVIRONMENT_SLOTS": "8",
}  # fmt: skip


@asynccontextmanager
async def role(
    name: str, url: str, auth: Path, folder: Path, *, before: Sequence[str] = ()
) -> AsyncIterator[anyio.abc.Process]:
    """One role as a process, with the keys of one folder."""
    variables = {key: value for key, value in os.environ.items() if not key.startswith("FLEETBUS_")}
    variables |= {f"FLEETBUS_{key}": value for key, value in SETTINGS.items()}
    variables |= {"FLEETBUS_NATS_URL": url, "FLEETBUS_NATS_AUTH": str(auth)}
    with (folder / f"{name}.log").open("ab") as log:
        process = await anyio.open_process(
            [*before, sys.executable, str(SCRIPT), name.partition("-")[0], name], cwd=folder, env=variables,
            stdin=subprocess.DEVNULL, stdout=log, stderr=log,
        )  # fmt: skip
    try:
        yield process
    finally:
        with anyio.CancelScope(shield=True):
            if process.returncode is None:
                process.send_signal(signal.SIGTERM)
                with anyio.move_on_after(20):
                    await process.wait()
            if process.returncode is None:
                process.kill()
            await process.aclose()


class Results:
    """Who finished which episode when, and whether training has ended; read from the log as it grows."""

    def __init__(self) -> None:
        self.finished: list[tuple[float, str, str]] = []
        self.steps = 0
        self.ended = anyio.Event()

    async def follow(self, bus: Bus) -> None:
        async with bus.read([S.episodes, S.train("default")]) as reader:
            while True:
                match read_stored(await reader.receive()):
                    case EpisodeFinished(worker=worker, outcome=outcome):
                        self.finished.append((anyio.current_time(), worker, outcome))
                    case StepTrained():
                        self.steps += 1
                    case TrainingFinished():
                        self.ended.set()

    def count(self, worker: str, since: float = 0.0) -> int:
        return sum(at >= since and name == worker for at, name, _ in self.finished)

    async def until(self, count: int, worker: str, since: float = 0.0) -> None:
        with anyio.fail_after(60):
            while self.count(worker, since) < count:  # noqa: ASYNC110  # what `follow` reads
                await anyio.sleep(0.05)


@asynccontextmanager
async def two_sites(folder: Path, form: str) -> AsyncIterator[tuple[RunningServers, list[Site]]]:
    """A run that is declared on one server or three, and two sites with a link to each of them."""
    namespace, count = has_namespaces(), 3 if form == "cluster" else 1
    plan = plan_run(RUN, lanes=4, max_bytes=1 << 28, replicas=count if count > 1 else 0)
    sites = [Site(folder, number, namespace=namespace) for number in (1, 2)]
    hosts = ["127.0.0.1", *(site.address for site in sites if namespace)]
    async with AsyncExitStack() as stack:
        ports = free_ports(count)
        running = running_servers(folder, [plan], form=form, leaf_ports=ports, hosts=hosts)
        servers = await stack.enter_async_context(running)
        await servers.declare(plan)
        assert servers.auth is not None
        for site in sites:
            await stack.enter_async_context(site.linked())
            linked = running_site(site, servers.auth, [plan], ports, one_way_seconds=ONE_WAY_SECONDS)
            await stack.enter_async_context(linked)
        yield servers, sites


async def play(results: Results, sites: Sequence[Site], processes: Sequence[anyio.abc.Process]) -> dict[str, float]:
    """Until training ends; the second site is cut off on the way. What happened meanwhile."""
    for worker in ("environment-1", "environment-2"):
        await results.until(8, worker)
    cut, steps = anyio.current_time(), results.steps
    await sites[1].cut()
    await anyio.sleep(CUT_SECONDS)
    mended = anyio.current_time()
    told: dict[str, float] = {"steps": results.steps - steps}
    told |= {f"episodes of site {number}": results.count(f"environment-{number}", cut + 1) for number in (1, 2)}
    await sites[1].mend()
    await results.until(1, "environment-2", mended)
    told |= {"seconds until site 2 had a result": round(anyio.current_time() - mended, 1)}
    with anyio.fail_after(150):
        await results.ended.wait()
    assert [process.returncode for process in processes] == [None] * len(processes), "a cut ended a worker"
    return told


@pytest.mark.parametrize("form", ["keyed", "cluster"])
async def test_both_sites_play_one_is_cut_off_and_back_and_nothing_is_lost(form: str, tmp_path: Path) -> None:
    results, processes, begun = Results(), [], anyio.current_time()
    async with two_sites(tmp_path, form) as (servers, sites), servers.connect(RUN, "monitor-1") as bus:
        assert servers.auth is not None
        async with AsyncExitStack() as stack:
            for number, site in enumerate(sites, start=1):
                played = role(f"environment-{number}", site.url, site.auth.path, tmp_path, before=site.command())
                processes.append(await stack.enter_async_context(played))
            for name in ("inference-1", "learner"):
                await stack.enter_async_context(role(name, servers.url, servers.auth.path, tmp_path))
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(results.follow, bus)
                told = await play(results, sites, processes)
                tasks.cancel_scope.cancel()
        report = await audit_run(bus, S)
        refused = await servers.violations()
    outcomes = Counter(f"{worker} {outcome}" for _, worker, outcome in results.finished)
    print(f"{form}, namespaces {sites[0].is_namespace}, {anyio.current_time() - begun:.0f} s: {told}, {dict(outcomes)}")
    assert report.balanced, report.findings
    assert refused == []
    assert told["episodes of site 2"] == 0, "the cut did not cut"
    assert told["episodes of site 1"] > 0
    assert told["steps"] > 0
    assert {outcome for _, _, outcome in results.finished} <= {"completed", "cancelled", "stale"}
    assert [process.returncode for process in processes] == [0, 0]
