"""A recorder raises the floor only if it has read what a learner stored when it began: what that one voids stays in the log."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import pytest

from fleetbus.bus.base import PublishAck, StreamEntry
from fleetbus.bus.memory import MemoryBus, MemoryServer
from fleetbus.bus.streams import plan_run
from fleetbus.concurrency.runtime import Runtime
from fleetbus.core.training.floor import NO_FLOOR
from fleetbus.errors import LogLost
from fleetbus.log.archive_writer import ArchiveWriter, open_archive
from fleetbus.log.floor import fence_floor, read_floor, read_floor_after
from fleetbus_schemas import EpisodeFinished, EpisodeLabeled, EpisodeRequested, FloorRaised, Subjects, Task, decode, encode
from fleetbus_workers.recorder.log_trimmer import LogTrimmer
from tests.support.small_deployment import run_inline
from tests.support.virtual_time import virtual_time

S = Subjects("run")
RUNTIME = Runtime(offload=run_inline)

anyio_backend = virtual_time


@pytest.fixture
def server() -> MemoryServer:
    return MemoryServer()


@pytest.fixture
async def bus(server: MemoryServer) -> AsyncIterator[MemoryBus]:
    async with server.connect("run") as memory:
        await memory.declare(plan_run("run", lanes=2))
        yield memory


@pytest.fixture
def recorder(bus: MemoryBus, tmp_path: Path) -> Iterator[Recorder]:
    with open_archive(tmp_path, "run") as archive:
        yield Recorder(bus, archive)


class Recorder:
    """What decides about the floor, fed by hand with what it would have archived."""

    def __init__(self, bus: MemoryBus, archive: ArchiveWriter, settle_seconds: float = 0.0) -> None:
        self._bus = bus
        self._trimmer = LogTrimmer(bus, S, archive, window_seconds=0.0, runtime=RUNTIME, settle_seconds=settle_seconds)

    async def read(self) -> None:
        async for entry in self._bus.scan([S.log], start=self._trimmer.last_entered + 1):
            self._trimmer.enter(entry)

    async def trim(self) -> FloorRaised:
        await anyio.sleep(1)
        await self._trimmer.trim()
        return await read_floor(self._bus, S)


async def request(bus: MemoryBus, episode: str) -> int:
    requested = EpisodeRequested(
        episode_id=episode, group_id=episode, sample_index=0, task=Task(key="t"), policy="p", deadline_ns=1, split="eval"
    )
    return (await bus.publish(S.task("default", episode), encode(requested))).sequence


async def finish(bus: MemoryBus, episode: str, *, beneath: str = "") -> None:
    """``beneath``: the episode on whose subject the result is stored, its own unless given."""
    result = EpisodeFinished(episode_id=episode, group_id=episode, attempt=1, outcome="completed", worker="w", split="eval")
    await bus.publish(S.episode(beneath or episode), encode(result))


async def play(bus: MemoryBus, episode: str) -> None:
    await request(bus, episode)
    await finish(bus, episode)


async def test_without_a_floor_a_learner_stores_none_and_who_raises_one_has_read_up_to_the_first(
    bus: MemoryBus, recorder: Recorder
) -> None:
    await play(bus, "a")
    assert await fence_floor(bus, S) == NO_FLOOR
    assert await bus.last(S.floor) is None
    await recorder.read()
    assert await recorder.trim() == NO_FLOOR
    await recorder.read()
    assert (await recorder.trim()).sequence > 1


async def test_a_floor_is_not_raised_over_what_a_learner_stored_when_it_began(bus: MemoryBus, recorder: Recorder) -> None:
    for episode in ("a", "b"):
        await play(bus, episode)
        await recorder.read()
        raised = await recorder.trim()
    await recorder.read()
    await play(bus, "c")
    await recorder.read()
    assert await fence_floor(bus, S) == raised
    assert await recorder.trim() == raised, "the learner counts with this floor, and with no other"
    await recorder.read()
    assert (await recorder.trim()).sequence > raised.sequence


@pytest.mark.parametrize("hours", [-5, 5])
async def test_a_busy_log_is_trimmed_after_the_servers_clock_was_set(
    server: MemoryServer, bus: MemoryBus, tmp_path: Path, hours: int
) -> None:
    """Set back, it was not for as many hours, and filled."""
    with open_archive(tmp_path / "archive", "run") as archive:
        recorder = Recorder(bus, archive, settle_seconds=10.0)
        await play(bus, "a")
        await recorder.read()
        await recorder.trim()
        server.step_clock(hours * 3600)
        played = [await request(bus, "b")]
        await finish(bus, "b")
        for episode in range(20):
            played.append(await request(bus, f"c{episode}"))
            await finish(bus, f"c{episode}")
            await recorder.read()
            raised = await recorder.trim()
    assert played[0] < raised.sequence <= played[-8], "what was settled for ten seconds, and nothing younger"


@pytest.mark.parametrize("hours", [-5, 5])
async def test_what_has_just_been_settled_stays_until_its_time_is_over_whatever_the_servers_clock_is_set_to(
    server: MemoryServer, bus: MemoryBus, tmp_path: Path, hours: int
) -> None:
    """Who asked for it outside of training may be about to read it."""
    with open_archive(tmp_path / "archive", "run") as archive:
        recorder = Recorder(bus, archive, settle_seconds=10.0)
        await play(bus, "a")
        await recorder.read()
        await recorder.trim()
        played = await request(bus, "b")
        await finish(bus, "b")
        server.step_clock(hours * 3600)
        sequences = []
        for _ in range(15):
            await recorder.read()
            sequences.append((await recorder.trim()).sequence)
    assert max(sequences[:8]) <= played < sequences[-1]


async def test_the_floor_does_not_pass_an_episode_whose_result_stands_on_the_subject_of_another(
    bus: MemoryBus, recorder: Recorder
) -> None:
    await play(bus, "a")
    await recorder.read()
    await recorder.trim()
    opened = await request(bus, "open")
    await finish(bus, "open", beneath="a")
    for _ in range(3):
        await recorder.read()
        raised = await recorder.trim()
    assert 0 < raised.sequence <= opened


async def test_labels_leave_with_the_floor_and_those_of_what_is_open_stay(bus: MemoryBus, recorder: Recorder) -> None:
    await play(bus, "a")
    await bus.publish(S.label("a"), encode(EpisodeLabeled(episode_id="a", add=("good",))))
    await request(bus, "open")
    await bus.publish(S.label("open"), encode(EpisodeLabeled(episode_id="open", add=("good",))))
    for _ in range(3):
        await recorder.read()
        await recorder.trim()
    assert [entry.subject async for entry in bus.scan([S.labels])] == [S.label("open")]


@pytest.mark.parametrize("later", [0, 1, 5])
async def test_from_a_log_that_went_back_nothing_is_removed_before_its_reader_has_noticed(
    server: MemoryServer, bus: MemoryBus, recorder: Recorder, later: int
) -> None:
    """What was settled for good is open in it; that it has grown again since makes no difference."""
    await play(bus, "a")
    await recorder.read()
    await recorder.trim()
    await recorder.read()
    files = server.copy_files()
    for episode in ("b", "c"):
        await play(bus, episode)
    await recorder.read()
    server.put_back(files)
    await anyio.sleep(1)
    for number in range(later):
        await play(bus, f"later{number}")
    before = [entry async for entry in bus.scan([S.log])]
    assert await recorder.trim() == NO_FLOOR
    assert [entry async for entry in bus.scan([S.log])] == before


async def test_a_floor_that_was_on_its_way_when_the_log_went_back_is_refused(
    server: MemoryServer, bus: MemoryBus, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would refuse what is requested from then on, whose positions are below it."""
    await play(bus, "a")
    await recorder.read()
    await recorder.trim()
    await recorder.read()
    files, publish = server.copy_files(), bus.publish
    for episode in ("b", "c"):
        await play(bus, episode)
    await recorder.read()

    async def publish_late(subject: str, payload: bytes, **options: Any) -> PublishAck:
        if decode(FloorRaised, payload).sequence:
            server.put_back(files)
        return await publish(subject, payload, **options)

    monkeypatch.setattr(bus, "publish", publish_late)
    assert await recorder.trim() == NO_FLOOR


@pytest.mark.parametrize("removal", range(1, 6))
@pytest.mark.parametrize("lost", ["what was settled", "the raised floor"])
async def test_a_log_that_goes_back_between_two_removals_keeps_what_it_holds_then(
    server: MemoryServer, bus: MemoryBus, recorder: Recorder, monkeypatch: pytest.MonkeyPatch, lost: str, removal: int
) -> None:
    """What is requested then is open, and has the sequences of what was settled."""
    await play(bus, "a")
    await recorder.read()
    await recorder.trim()
    await recorder.read()
    files, purge = server.copy_files(), bus.purge
    for episode in ("b", "c"):
        await play(bus, episode)
    await recorder.read()
    if lost == "the raised floor":
        files = server.copy_files()
    held: list[StreamEntry] = []
    removals = 0

    async def purge_and_go_back(subject: str, *, below: int) -> None:
        nonlocal removals
        await purge(subject, below=below)
        removals += 1
        if removals == removal:
            server.put_back(files)
            for number in range(4):
                await play(bus, f"later{number}")
            held.extend([entry async for entry in bus.scan([S.log]) if ".later" in entry.subject])

    monkeypatch.setattr(bus, "purge", purge_and_go_back)
    await recorder.trim()
    assert len(held) == 8
    assert removals == removal or (lost, removal) in [("the raised floor", 1), ("the raised floor", 2)], "nothing was lost then"
    left = {entry.sequence: entry.payload async for entry in bus.scan([S.log])}
    assert [left.get(entry.sequence) for entry in held] == [entry.payload for entry in held]


class ShortenedLog:
    """A log without the entry that is asked for; what stands at its position is ``there``."""

    def __init__(self, last_sequence: int, there: StreamEntry | None = None) -> None:
        self._last_sequence, self._there = last_sequence, there

    async def last_of_each(self, subjects: Sequence[str]) -> list[StreamEntry]:
        return []

    async def log_state(self) -> Any:
        return SimpleNamespace(last_sequence=self._last_sequence)

    async def next_entry(self, subject: str, *, start: int) -> StreamEntry | None:
        return self._there


@pytest.mark.anyio
@pytest.mark.parametrize(
    "shortened",
    [ShortenedLog(8), ShortenedLog(20, StreamEntry(subject="fb.r.task.default.b", payload=b"", sequence=9, time_ns=0))],
    ids=["it ends before", "something else stands there"],
)
async def test_an_entry_that_the_log_has_lost_is_not_waited_for(shortened: ShortenedLog) -> None:
    with anyio.fail_after(5), pytest.raises(LogLost, match="entry 9 on"):
        await read_floor_after(shortened, Subjects("r"), "fb.r.episode.a", 9)  # type: ignore[arg-type]


@pytest.mark.anyio
async def test_an_entry_that_a_replica_does_not_have_yet_is_waited_for() -> None:
    with anyio.move_on_after(0.05) as waited:
        await read_floor_after(ShortenedLog(9), Subjects("r"), "fb.r.episode.a", 9)  # type: ignore[arg-type]
    assert waited.cancelled_caught
