"""A whole fleet on a log that is too small for it, with and without a recorder, in memory and on NATS."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any, cast

import anyio
import anyio.abc
import pytest
import structlog

from fleetbus.audit.run import audit_archive, audit_run
from fleetbus.bus.base import Bus
from fleetbus.bus.memory import MemoryServer
from fleetbus.bus.streams import plan_run
from fleetbus.config.settings import (
    ADMISSION_SHARE,
    Configuration,
    EpisodeSettings,
    EvaluationSettings,
    LearnerSettings,
    LimitSettings,
    NatsSettings,
    RunSettings,
)
from fleetbus.errors import UserError
from fleetbus.log.archive_reader import read_archive
from fleetbus.log.episodes import decode_episode_entry
from fleetbus_schemas import EpisodeFinished, Subjects, Task
from fleetbus_workers.environment.adapters.scripted import ScriptedEnvironment
from fleetbus_workers.environment.worker import run_environment
from fleetbus_workers.inference.scripted import ScriptedSampler, ScriptedTemplate
from fleetbus_workers.inference.worker import run_inference
from fleetbus_workers.learner.curriculum import Curriculum
from fleetbus_workers.learner.scripted import ScriptedTrainer
from fleetbus_workers.learner.worker import run_learner
from fleetbus_workers.recorder.worker import RecorderSettings, run_recorder
from tests.support.connections import Connect, connections_to

pytestmark = pytest.mark.integration

LOG_BYTES = 1 << 20
STEPS, GROUPS, GROUP_SIZE, TURNS = 12, 2, 4, 12
"""A step's episodes take about an eighth of the log."""

S = Subjects("small")


@pytest.fixture(params=["memory", "nats"])
async def connections(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Connect]:
    async with connections_to(request.param, "small", tmp_path) as connect:
        yield connect


class Events:
    """A structlog processor that remembers events and wakes whoever waits for one."""

    def __init__(self) -> None:
        self.seen: dict[str, anyio.Event] = {}

    def __call__(self, _logger: Any, _method: str, event: Any) -> Any:
        self.of(event["event"]).set()
        raise structlog.DropEvent

    def of(self, name: str) -> anyio.Event:
        return self.seen.setdefault(name, anyio.Event())


@pytest.fixture
async def events(anyio_backend: str) -> AsyncIterator[Events]:
    events = Events()
    before = structlog.get_config()
    structlog.configure(processors=[events])
    yield events
    structlog.configure(**before)


class Started:
    """A worker that runs and can be killed."""

    def __init__(self) -> None:
        self.scope = anyio.CancelScope()
        self.ended = anyio.Event()

    async def kill(self) -> None:
        self.scope.cancel()
        await self.ended.wait()


class SmallFleet:
    """Workers on a small log."""

    def __init__(self, connections: Connect, group: anyio.abc.TaskGroup, folder: Path) -> None:
        self._connections = connections
        self._group = group
        self.archive = folder / "archive"
        self.drain = anyio.Event()
        self.configuration = Configuration(
            run=RunSettings(name="small", folder=str(folder)),
            nats=NatsSettings(lanes=4, max_bytes=LOG_BYTES),
            learner=LearnerSettings(
                steps=STEPS, groups=GROUPS, group_size=GROUP_SIZE, max_staleness=1, checkpoint_every=10, stale_groups="keep"
            ),
            episode=EpisodeSettings(max_turns=TURNS),
            evaluation=EvaluationSettings(episodes=2, greedy=False),
            limits=LimitSettings(drain=0.5),
        )

    def start(self, work: Callable[[Bus, str], Any], name: str) -> Started:
        started = Started()

        async def run() -> None:
            with started.scope:
                async with self._connections(name) as bus:
                    await work(bus, name)
            started.ended.set()

        self._group.start_soon(run)
        return started

    def start_workers(self) -> None:
        self.start(self.play, "environment")
        self.start(self.infer, "inference")

    def start_learner(self, name: str, trained: anyio.Event, trainer: ScriptedTrainer | None = None) -> Started:
        tasks = [Task(key=f"t{index}", prompt="p", config={"turns": TURNS}) for index in range(4)]

        async def train(bus: Bus, name: str) -> None:
            await run_learner(
                bus, configuration=self.configuration, name=name, drain=anyio.Event(), trainer=trainer or ScriptedTrainer(),
                curriculum=Curriculum(tasks, tasks, seed=1),
            )  # fmt: skip
            trained.set()

        return self.start(train, name)

    def start_recorder(self, name: str, drain: anyio.Event | None = None) -> Started:
        async def record(bus: Bus, name: str) -> None:
            await run_recorder(
                bus, configuration=self.configuration, name=name, drain=drain or self.drain, folder=self.archive,
                settings=RecorderSettings(batch_seconds=0.05, trim_seconds=0.2, segment_bytes=LOG_BYTES, settle_seconds=0.5),
            )  # fmt: skip

        return self.start(record, name)

    async def play(self, bus: Bus, name: str) -> None:
        await run_environment(bus, configuration=self.configuration, name=name, drain=self.drain, make=ScriptedEnvironment)

    async def infer(self, bus: Bus, name: str) -> None:
        await run_inference(
            bus, configuration=self.configuration, name=name, drain=self.drain, sampler=ScriptedSampler(tokens=64),
            template=ScriptedTemplate(),
        )  # fmt: skip


async def declared(bus: Bus) -> None:
    await bus.declare(plan_run("small", lanes=4, max_bytes=LOG_BYTES, duplicate_window_seconds=0.5))


async def until_all_requested_are_finished(bus: Bus, waits: anyio.Event) -> set[str]:
    """Wait until the log is as full as admission lets it be and nothing is in flight any more; returns the episodes."""
    requested: set[str] = set()
    finished: set[str] = set()
    async with bus.read([S.tasks(), S.episodes]) as reader:
        while not waits.is_set() or requested != finished or (await bus.log_state()).used_bytes < ADMISSION_SHARE * LOG_BYTES:
            with anyio.move_on_after(0.2):
                entry = await reader.receive()
                if entry.subject.startswith(S.tasks()[: -len("*.>")]):
                    requested.add(entry.subject.rpartition(".")[2])
                elif isinstance(result := decode_episode_entry(entry), EpisodeFinished):
                    finished.add(result.episode_id)
    return finished


@pytest.mark.timeout(180)
async def test_when_the_log_is_full_new_requests_wait_admitted_work_finishes_and_with_an_archive_room_returns(
    connections: Connect, tmp_path: Path, events: Events
) -> None:
    trained = anyio.Event()
    with anyio.fail_after(150):
        async with connections("test") as bus, anyio.create_task_group() as group:
            await declared(bus)
            fleet = SmallFleet(connections, group, tmp_path)
            fleet.start_workers()
            fleet.start_learner("learner", trained)
            finished = await until_all_requested_are_finished(bus, events.of("log is full; admission waits for room"))
            state = await bus.log_state()
            assert ADMISSION_SHARE * state.limit_bytes <= state.used_bytes < state.limit_bytes == LOG_BYTES
            assert not events.of("request publish failed; retrying").is_set()
            assert not events.of("result publish failed; retrying").is_set()
            assert not trained.is_set()

            fleet.start_recorder("recorder")
            await trained.wait()
            fleet.drain.set()
        async with connections("test") as bus:
            report = await audit_run(bus, S, archive=fleet.archive)
    assert len(finished) < report.books.requested
    assert report.findings == ()
    assert report.books.trained == STEPS * GROUPS * GROUP_SIZE


@pytest.mark.timeout(180)
async def test_with_an_archive_a_fleet_makes_more_than_the_log_could_hold_whoever_is_killed(
    connections: Connect, tmp_path: Path, events: Events
) -> None:
    trained = anyio.Event()
    with anyio.fail_after(150):
        async with connections("test") as bus, anyio.create_task_group() as group:
            await declared(bus)
            fleet = SmallFleet(connections, group, tmp_path)
            fleet.start_workers()
            first_recorder = fleet.start_recorder("recorder-0")
            first_learner = fleet.start_learner("learner-0", trained)
            await events.of("log trimmed").wait()
            await first_recorder.kill()
            await first_learner.kill()
            fleet.start_recorder("recorder-1")
            fleet.start_learner("learner-1", trained)
            await trained.wait()
            fleet.drain.set()
        async with connections("test") as bus:
            report = await audit_run(bus, S, archive=fleet.archive)
            with pytest.raises(UserError, match="were trimmed: give --archive"):
                await audit_run(bus, S)
            kept = {entry.subject.split(".")[2] async for entry in bus.scan([S.log])}
    assert report.findings == ()
    assert report.lineages == ("l1", "l2")
    assert report.books.trained == STEPS * GROUPS * GROUP_SIZE
    archived = list(read_archive(fleet.archive, run="small"))
    assert sum(len(entry.payload) for entry in archived) > LOG_BYTES
    assert [entry.sequence for entry in archived] == list(range(1, len(archived) + 1))
    assert {"task", "episode", "train", "policy", "life"} <= kept
    assert (await audit_archive(S, fleet.archive)).books == report.books


async def test_a_drained_recorder_has_archived_what_the_log_held(connections: Connect, tmp_path: Path) -> None:
    drain = anyio.Event()
    with anyio.fail_after(50):
        async with connections("test") as bus, anyio.create_task_group() as group:
            await declared(bus)
            fleet = SmallFleet(connections, group, tmp_path)
            for number in range(300):
                await bus.publish(S.session("s"), b"%d" % number)
            drain.set()
            fleet.start_recorder("recorder", drain)
        archived = [entry for entry in read_archive(fleet.archive, run="small") if entry.subject == S.session("s")]
    assert [entry.payload for entry in archived] == [b"%d" % number for number in range(300)]


class CountedReads:
    """A bus that notes which entries its worker reads."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self.read_from = 0
        self.scanned: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._bus, name)

    def read(self, subjects: Sequence[str], *, start: int = 1) -> Any:
        self.read_from = start
        return self._bus.read(subjects, start=start)

    async def scan(self, subjects: Sequence[str], *, start: int = 1) -> AsyncIterator[Any]:
        async for entry in self._bus.scan(subjects, start=start):
            self.scanned.append(entry.subject.split(".")[2])
            yield entry


async def test_a_recorder_that_goes_on_does_not_read_again_what_it_has_archived(connections: Connect, tmp_path: Path) -> None:
    with anyio.fail_after(50):
        async with connections("test") as bus:
            await declared(bus)
            configuration = Configuration(run=RunSettings(name="small", folder=str(tmp_path)))
            ended = []
            for number in (1, 2):
                for subject in (S.session("s"), S.action("e0", "e"), S.train("default")):
                    await bus.publish(subject, b"%d" % number)
                drain, counted = anyio.Event(), CountedReads(bus)
                drain.set()
                ended.append((await bus.log_state()).last_sequence)
                await run_recorder(
                    cast(Bus, counted), configuration=configuration, name=f"r{number}", drain=drain, folder=tmp_path / "archive"
                )
    assert counted.read_from > ended[0]
    assert set(counted.scanned) == {"session", "train"}
    archived = [entry.sequence for entry in read_archive(tmp_path / "archive", run="small")]
    assert archived[: ended[1]] == list(range(1, ended[1] + 1))


async def test_a_run_has_one_recorder_and_an_archive_one_log(tmp_path: Path) -> None:
    configuration = Configuration(run=RunSettings(name="small", folder=str(tmp_path)))

    async def recorded(server: MemoryServer) -> None:
        drain = anyio.Event()
        drain.set()
        async with server.connect("small") as bus:
            await declared(bus)
            await bus.publish(S.session("s"), b"x")
            await run_recorder(bus, configuration=configuration, name="r", drain=drain, folder=tmp_path / "archive")

    with anyio.fail_after(50):
        server = MemoryServer()
        await recorded(server)
        await recorded(server)
        with pytest.raises(UserError, match="archive of an earlier log of run small"):
            await recorded(MemoryServer())
