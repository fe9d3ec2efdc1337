"""The fleet of processes: restarts, the end of the final one, stops in order and within the time, nothing left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import msgspec
import psutil
import pytest

from fleetbus_schemas import StepTrained
from fleetbus_workers.up import supervisor
from fleetbus_workers.up.process import ChildProcess, ProcessPlan, start_process
from fleetbus_workers.up.restarts import Achievements
from fleetbus_workers.up.server import end_stray_server
from fleetbus_workers.up.supervisor import Supervisor, WorkerUnrecoverable

pytestmark = pytest.mark.integration

ROLE = """
import os, signal, sys, time
name, behaviour, folder = sys.argv[1:4]
def stamp(event):
    with open(os.path.join(folder, "events"), "a") as events:
        events.write(f"{name} {event} {os.getpid()}\\n")
def leave(*_):
    stamp("drained")
    sys.exit(0)
signal.signal(signal.SIGTERM, signal.SIG_IGN if behaviour == "stubborn" else leave)
if behaviour == "parent":
    import subprocess
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    stamp(f"child={child.pid}")
stamp("started")
if behaviour == "finish":
    sys.exit(0)
if behaviour == "writer":
    def write(*_):
        stamp("writing")
        with open(os.path.join(folder, "checkpoint"), "ab", buffering=0) as file:
            for _ in range(15):
                file.write(b"x")
                time.sleep(0.1)
        leave()
    signal.signal(signal.SIGTERM, write)
if behaviour == "hung writer":
    def write_once(*_):
        open(os.path.join(folder, "checkpoint"), "ab").write(b"x")
        stamp("writing")
    signal.signal(signal.SIGTERM, write_once)
    while True:
        time.sleep(1)
if behaviour == "crash":
    print("the last words of", name)
    sys.exit(3)
if behaviour == "server away":
    start = int(name.rpartition(".")[2])
    if start < 4:
        sys.exit(2 if start else 3)
if behaviour == "refuse":
    print("fleetbus: no such model")
    sys.exit(2)
sys.stdin.read()
stamp("orphaned")
"""
"""Stands in for a role process: writes what happens to it into a file."""


class Stage:
    """A folder with the events of scripted processes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "events").touch()
        self.reports: list[str] = []
        self.achievements = Achievements()

    def plan(self, name: str, behaviour: str, limit: float = 20.0) -> ProcessPlan:
        def command(start: int) -> Sequence[str]:
            return [sys.executable, "-c", ROLE, f"{name}.{start}", behaviour, str(self.folder)]

        return ProcessPlan(
            name=name,
            stop_limit_seconds=limit,
            command=command,
            log=self.folder / f"{name}.log",
            environment=os.environ,
            output=(self.folder,) if "writer" in behaviour else (),
        )

    def fleet(self, *plans: ProcessPlan, final: tuple[str, ...] = ("learner",)) -> Supervisor:
        return Supervisor(plans, final=final, report=self.reports.append, achieved=self.achievements.count)

    @asynccontextmanager
    async def supervised(self, fleet: Supervisor) -> AsyncIterator[None]:
        """Run it, and stop it at the end."""
        with anyio.fail_after(50):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(fleet.run)
                yield
                await fleet.stop()

    def events(self) -> list[list[str]]:
        return [line.split() for line in (self.folder / "events").read_text().splitlines()]

    def names(self, event: str) -> list[str]:
        return [name for name, happened, _ in self.events() if happened == event]

    async def until(self, event: str, count: int) -> None:
        """Wait for scripted processes in other processes: only polling can."""
        with anyio.fail_after(50):
            while len(self.names(event)) < count:  # noqa: ASYNC110
                await anyio.sleep(0.02)

    def running(self) -> list[int]:
        return [pid for _, _, text in self.events() if psutil.pid_exists(pid := int(text)) and _alive(pid)]


def _alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


async def test_they_stop_stage_by_stage_and_nothing_is_left(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    fleet = stage.fleet(
        stage.plan("inference", "serve", 30.0), stage.plan("learner", "serve", 10.0), stage.plan("environment", "serve", 20.0)
    )
    async with stage.supervised(fleet):
        await stage.until("started", 3)
    assert stage.names("drained") == ["learner.0", "environment.0", "inference.0"]
    assert stage.running() == [] and stage.reports == []


async def test_a_process_that_hangs_is_replaced_and_no_other(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    fleet = stage.fleet(
        stage.plan("environment", "serve"), stage.plan("environment-1", "serve"), stage.plan("learner", "serve")
    )
    async with stage.supervised(fleet):
        await stage.until("started", 3)
        fleet.replace_hung("environment", "elsewhere")
        fleet.replace_hung("environment", "environment-1")
        await stage.until("started", 4)
    assert stage.names("started").count("environment-1.1") == 1
    assert stage.reports[0] == "environment-1 hangs, and is killed: what it was at is done again"
    assert "environment-1 ended with status -9" in stage.reports[1] and len(stage.reports) == 2


async def test_what_took_the_place_of_a_worker_that_crashed_is_not_killed_for_its_silence(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    fleet = stage.fleet(stage.plan("environment", "serve"), stage.plan("learner", "serve"))
    async with stage.supervised(fleet):
        await stage.until("started", 2)
        fleet.replace_hung("environment", "environment")
        await stage.until("started", 3)
        fleet.replace_hung("environment", "environment")
        fleet.replace_hung("environment", "environment-7")
        fleet.replace_hung("gateway", "environment-1")
        fleet.replace_hung("gateway", "learner")
    assert stage.names("started").count("environment.1") == 1 and len(stage.names("started")) == 3
    assert [report for report in stage.reports if "hangs" in report] == [stage.reports[0]]
    assert sorted(stage.names("drained")) == ["environment.1", "learner.0"]


async def test_a_stop_waits_while_a_checkpoint_grows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "WRITING_SECONDS", 5.0)
    stage = Stage(tmp_path)
    fleet = stage.fleet(stage.plan("learner", "writer", 0.3))
    async with stage.supervised(fleet):
        await stage.until("started", 1)
    assert stage.names("drained") == ["learner.0"] and (tmp_path / "checkpoint").stat().st_size == 15
    assert stage.reports == ["learner is still writing; waiting until its files are complete"]


async def test_who_stops_writing_without_ending_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "WRITING_SECONDS", 0.3)
    stage = Stage(tmp_path)
    fleet = stage.fleet(stage.plan("learner", "hung writer", 1.0))
    async with stage.supervised(fleet):
        await stage.until("started", 1)
    assert stage.names("drained") == [] and stage.running() == []
    assert "was killed" in stage.reports[-1]


async def test_a_process_that_was_being_started_when_all_stop_is_killed(tmp_path: Path) -> None:
    """`stop` does not know it, and it may hang upon SIGTERM: `up` waited for it for ever."""

    class StartedLate(ProcessPlan, frozen=True, kw_only=True):
        is_stopped: anyio.Event

        @asynccontextmanager
        async def start(self, number: int) -> AsyncIterator[ChildProcess]:
            async with start_process(self, number) as child:
                await self.is_stopped.wait()
                yield child

    stage = Stage(tmp_path)
    is_stopped = anyio.Event()
    plan = StartedLate(**msgspec.structs.asdict(stage.plan("learner", "stubborn", 1.0)), is_stopped=is_stopped)
    fleet = stage.fleet(plan)
    with anyio.fail_after(20):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(fleet.run)
            await stage.until("started", 1)
            await fleet.stop()
            is_stopped.set()
    assert stage.running() == []


async def test_the_final_process_exiting_0_finishes_the_run_and_is_not_started_again(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    fleet = stage.fleet(stage.plan("learner", "finish"), stage.plan("environment", "serve", 20.0))
    async with stage.supervised(fleet):
        await fleet.over.wait()
        assert fleet.failure is None
        await stage.until("started", 2)
    assert sorted(stage.names("started")) == ["environment.0", "learner.0"]
    assert stage.running() == []


async def test_a_run_of_two_final_processes_goes_on_until_both_have_exited_0(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    plans = stage.plan("learner", "finish"), stage.plan("learner-solver", "serve", 20.0)
    fleet = stage.fleet(*plans, final=("learner", "learner-solver"))
    async with stage.supervised(fleet):
        await stage.until("started", 2)
        with anyio.move_on_after(1.0):
            await fleet.over.wait()
        assert not fleet.over.is_set()
    assert stage.running() == []


async def test_a_killed_worker_is_started_again_under_the_next_number(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    fleet = stage.fleet(stage.plan("environment", "serve"))
    async with stage.supervised(fleet):
        await stage.until("started", 1)
        os.kill(stage.running()[0], signal.SIGKILL)
        await stage.until("started", 2)
    assert stage.names("started") == ["environment.0", "environment.1"]
    assert "environment ended with status -9" in stage.reports[0]
    assert stage.running() == []


async def test_a_worker_that_keeps_crashing_fails_the_run_with_its_last_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fleetbus_workers.up.restarts.FIRST_DELAY_SECONDS", 0.001)
    stage = Stage(tmp_path)
    fleet = stage.fleet(stage.plan("environment", "crash"), stage.plan("inference", "serve", 20.0))
    async with stage.supervised(fleet):
        await fleet.over.wait()
        assert stage.names("drained") == []
    assert isinstance(fleet.failure, WorkerUnrecoverable)
    assert fleet.failure.tail[-1] == "the last words of environment.4"
    assert stage.names("drained") == ["inference.0"]
    assert stage.running() == []


async def test_a_learner_that_dies_after_each_start_is_given_up_with_the_cause_however_long_it_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each start resumes at step 10, trains step 11 and dies: that is achieved once. How many seconds passed is not asked."""
    monkeypatch.setattr("fleetbus_workers.up.restarts.FIRST_DELAY_SECONDS", 0.001)
    stage = Stage(tmp_path)
    plan = stage.plan("learner", "crash")

    class TrainsOneStep(ProcessPlan, frozen=True, kw_only=True):
        @asynccontextmanager
        async def start(self, number: int) -> AsyncIterator[ChildProcess]:
            stage.achievements.apply(StepTrained(lineage=f"l{number}", step=11, version=11 + number, episodes=()))
            async with start_process(self, number) as child:
                yield child

    fleet = stage.fleet(TrainsOneStep(**msgspec.structs.asdict(plan)), stage.plan("inference", "serve", 20.0))
    async with stage.supervised(fleet):
        await fleet.over.wait()
    assert str(fleet.failure) == (
        "learner ended with status 3 and was given up after 5 crashes in a row without a new training step"
    )
    assert fleet.failure is not None and fleet.failure.tail[-1] == "the last words of learner.4"


async def test_a_worker_that_refuses_its_configuration_is_not_started_again(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    fleet = stage.fleet(stage.plan("inference", "refuse"))
    with anyio.fail_after(50):
        await fleet.run()
    assert fleet.over.is_set()
    assert isinstance(fleet.failure, WorkerUnrecoverable) and fleet.failure.tail == ["fleetbus: no such model"]
    assert stage.names("started") == ["inference.0"]


async def test_a_worker_that_crashes_while_the_server_is_away_is_started_again_until_it_can_begin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fleetbus_workers.up.restarts.LONGEST_DELAY_SECONDS", 0.01)
    stage = Stage(tmp_path)
    fleet = stage.fleet(stage.plan("environment", "server away"))
    async with stage.supervised(fleet):
        await stage.until("started", 5)
    assert fleet.failure is None
    assert stage.running() == []


async def test_a_worker_that_ignores_the_request_to_stop_is_killed_in_time(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    fleet = stage.fleet(stage.plan("learner", "stubborn", 1.0), stage.plan("environment", "serve", 20.0))
    async with stage.supervised(fleet):
        await stage.until("started", 2)
    assert stage.reports == ["learner did not stop in time and was killed: what it was at is done again"]
    assert stage.names("drained") == ["environment.0"]
    assert stage.running() == []


async def test_each_role_has_a_time_of_its_own_to_stop_whatever_those_before_it_took(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    fleet = stage.fleet(stage.plan("learner", "stubborn", 3.0), stage.plan("environment", "serve", 3.01))
    async with stage.supervised(fleet):
        await stage.until("started", 2)
    assert len(stage.reports) == 1 and stage.reports[0].startswith("learner did not stop")
    assert stage.names("drained") == ["environment.0"]


async def test_kill_ends_processes_and_their_children_at_once(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    fleet = stage.fleet(stage.plan("environment", "parent"))
    with anyio.fail_after(50):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(fleet.run)
            await stage.until("started", 1)
            grandchild = int(next(happened for _, happened, _ in stage.events() if "child=" in happened).partition("=")[2])
            assert _alive(grandchild)
            fleet.kill()
    with anyio.fail_after(50):
        while _alive(grandchild):  # noqa: ASYNC110
            await anyio.sleep(0.02)
    assert stage.names("drained") == [] and stage.running() == []


async def test_cancelling_all_roles_leaves_nothing_behind(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    fleet = stage.fleet(stage.plan("environment", "stubborn"), stage.plan("inference", "serve"))
    with anyio.fail_after(50):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(fleet.run)
            await stage.until("started", 2)
            tasks.cancel_scope.cancel()
        while stage.running():  # noqa: ASYNC110 - killed, and on a busy machine not yet gone
            await anyio.sleep(0.02)


async def test_a_server_whose_holder_was_killed_is_stopped(tmp_path: Path) -> None:
    store = tmp_path / "nats"
    holder = await anyio.open_process(
        [sys.executable, "-m", "fleetbus_workers.up.server", str(store), "0", str(tmp_path / "server.json")],
        stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    try:
        with anyio.fail_after(50):
            while not (tmp_path / "server.json").exists():  # noqa: ASYNC110
                await anyio.sleep(0.02)
            server = json.loads((tmp_path / "server.json").read_text())["pid"]
            holder.kill()
            await holder.wait()
            assert _alive(server)
            await end_stray_server(store)
            assert not _alive(server)
            await end_stray_server(tmp_path / "none")
    finally:
        with anyio.CancelScope(shield=True):
            await holder.aclose()
            await end_stray_server(store)


async def test_a_worker_that_was_drained_is_not_started_again(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    fleet = stage.fleet(stage.plan("environment", "finish"), stage.plan("inference", "serve"))
    async with stage.supervised(fleet):
        while not stage.reports:  # noqa: ASYNC110
            await anyio.sleep(0.02)
        await stage.until("started", 2)
    assert stage.reports == ["environment has stopped as it was asked to, and is not started again"]
    assert stage.names("started").count("environment.0") == 1
