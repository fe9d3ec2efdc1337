"""Settled episodes leave a short log from behind an open one: all of them, in a time that a slow line allows."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import anyio
import pytest

from fleetbus.bus.base import StreamEntry
from fleetbus.bus.memory import MemoryBus, MemoryServer
from fleetbus.bus.streams import plan_run
from fleetbus.concurrency.runtime import Runtime
from fleetbus.errors import BusError, RequestUnanswered
from fleetbus.log.archive_writer import open_archive
from fleetbus_schemas import CheckpointStored, EpisodeRequested, LineageStarted, StepTrained, Subjects, Task, encode
from fleetbus_workers.recorder import log_trimmer
from fleetbus_workers.recorder.log_trimmer import LogTrimmer
from tests.support.small_deployment import run_inline
from tests.support.virtual_time import virtual_time

S = Subjects("run")

anyio_backend = virtual_time


@pytest.fixture
async def bus() -> AsyncIterator[MemoryBus]:
    async with MemoryServer().connect("run") as memory:
        await memory.declare(plan_run("run", lanes=2))
        yield memory


@pytest.fixture
async def trimmer(bus: MemoryBus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[LogTrimmer]:
    monkeypatch.setattr(log_trimmer, "SHORT_SHARE", 0.0)
    with open_archive(tmp_path, "run") as archive:
        yield LogTrimmer(bus, S, archive, window_seconds=0.0, runtime=Runtime(offload=run_inline), settle_seconds=1e6)


async def play(bus: MemoryBus, trimmer: LogTrimmer, count: int) -> None:
    """An episode that stays open, and behind it so many that are settled."""
    episodes = [f"e{number}" for number in range(count)]
    await bus.publish(S.train("default"), encode(LineageStarted(lineage="l1", worker="w")))
    for episode in ("open", *episodes):
        request = EpisodeRequested(
            episode_id=episode,
            group_id="g",
            sample_index=0,
            split="train",
            task=Task(key="t"),
            policy="p",
            deadline_ns=1,
            lineage="l1",
        )
        await bus.publish(S.task("default", episode), encode(request))
        await bus.publish(S.observation("p", "any", episode), b"x")
        await bus.publish(S.action("e0", episode), b"x")
    step = StepTrained(lineage="l1", step=1, version=1, episodes=tuple(episodes))
    await bus.publish(S.train("default"), encode(step))
    await bus.publish(S.train("default"), encode(CheckpointStored(lineage="l1", step=1, version=1, file="f", floor=1)))
    async for entry in bus.scan([S.log]):
        trimmer.enter(entry)
    await anyio.sleep(1)


async def left(bus: MemoryBus) -> set[str]:
    """The episodes whose content is in the log."""
    return {entry.subject.rpartition(".")[2] async for entry in bus.scan([S.observations(), S.actions()])}


async def test_what_a_failed_removal_left_goes_with_the_next_trim(
    bus: MemoryBus, trimmer: LogTrimmer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A purge fails as soon as the connection is down: the rest of a thousand episodes stayed until the open one ended."""
    await play(bus, trimmer, 50)
    purge, removals = bus.purge, 0

    async def purge_until_down(subject: str, *, below: int) -> None:
        nonlocal removals
        removals += 1
        if removals > 20:
            raise RequestUnanswered("the connection was down")
        await purge(subject, below=below)

    monkeypatch.setattr(bus, "purge", purge_until_down)
    with pytest.raises(BusError):
        await trimmer.trim()
    assert 30 < len(await left(bus)) <= 51
    monkeypatch.setattr(bus, "purge", purge)
    await trimmer.trim()
    assert await left(bus) == {"open"}


@pytest.mark.integration
async def test_a_thousand_episodes_leave_within_a_minute_over_a_slow_line(
    bus: MemoryBus, trimmer: LogTrimmer, monkeypatch: pytest.MonkeyPatch
) -> None:
    await play(bus, trimmer, 1000)
    purge, next_entry = bus.purge, bus.next_entry

    async def purge_slowly(subject: str, *, below: int) -> None:
        await anyio.sleep(0.1)
        await purge(subject, below=below)

    async def look_slowly(subject: str, *, start: int) -> StreamEntry | None:
        await anyio.sleep(0.1)
        return await next_entry(subject, start=start)

    monkeypatch.setattr(bus, "purge", purge_slowly)
    monkeypatch.setattr(bus, "next_entry", look_slowly)
    began = anyio.current_time()
    await trimmer.trim()
    assert anyio.current_time() - began < 60
    assert await left(bus) == {"open"}
