"""A log that is followed: one that reads slower than others write has all of it in the end."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import cast

import anyio
import pytest

from fleetbus.bus.base import Bus, StreamEntry
from fleetbus.bus.memory import MemoryServer
from fleetbus.bus.streams import plan_run
from fleetbus.errors import BusError
from fleetbus.recording import load_recording
from fleetbus.recording.export import BUSY_ENTRIES, END_SECONDS, Export
from fleetbus.recording.format import RecordingHeader, compute_message_schema
from fleetbus.recording.writer import create_recording
from fleetbus_schemas import Subjects
from fleetbus_workers.cli.replay import record
from fleetbus_workers.run_access.sources import Source
from tests.support.virtual_time import virtual_time

RUN = "followed"
SUBJECTS = Subjects(RUN)
ENTRIES = 1000

anyio_backend = virtual_time


async def followed(server: MemoryServer, file: Path, *, killed: bool = False) -> int:
    """Entries in the file of one who is told to stop before it has read any."""
    async with server.connect(RUN) as bus:
        await bus.declare(plan_run(RUN, lanes=1))
        for number in range(ENTRIES):
            await bus.publish(SUBJECTS.episode(f"e{number}"), b"x")
        stop = anyio.Event()
        stop.set()
        if killed:
            server.kill()
        with create_recording(file, RecordingHeader(run=RUN, messages=compute_message_schema())) as writer:
            await Export(writer, redactor=None).follow(bus, SUBJECTS, stop, start=1)
    return len(load_recording(file).entries)


async def test_who_is_told_to_stop_reads_what_is_there_by_then(tmp_path: Path) -> None:
    assert await followed(MemoryServer(), tmp_path / "run.fbrec") == ENTRIES


async def test_where_the_server_is_gone_it_ends_with_what_it_has(tmp_path: Path) -> None:
    began = anyio.current_time()
    await followed(MemoryServer(), tmp_path / "run.fbrec", killed=True)
    assert anyio.current_time() - began <= 2 * END_SECONDS


@pytest.mark.integration
def test_a_busy_log_is_read_in_rounds_and_written_whole(tmp_path: Path) -> None:
    """Each entry once, in order; one that comes last does not wait for others."""
    file = tmp_path / "run.fbrec"

    async def follow() -> None:  # real time: threads write
        stop = anyio.Event()
        written = {count: anyio.Event() for count in (BUSY_ENTRIES, ENTRIES, ENTRIES + 1)}

        async with MemoryServer().connect(RUN) as bus:
            await bus.declare(plan_run(RUN, lanes=1))
            with create_recording(file, RecordingHeader(run=RUN, messages=compute_message_schema())) as writer:
                async with anyio.create_task_group() as group:
                    group.start_soon(
                        partial(
                            Export(writer, redactor=None).follow,
                            bus,
                            SUBJECTS,
                            stop,
                            start=1,
                            progress=lambda count: written[count].set(),
                        )
                    )
                    for number in range(ENTRIES):
                        await bus.publish(SUBJECTS.episode(f"e{number}"), b"x")
                    with anyio.fail_after(20):
                        await written[ENTRIES].wait()
                    await bus.publish(SUBJECTS.episode("last"), b"x")
                    with anyio.fail_after(20):
                        await written[ENTRIES + 1].wait()
                    stop.set()

    anyio.run(follow)
    assert [entry.sequence for entry in load_recording(file).entries] == list(range(1, ENTRIES + 2))


class Removed:
    """A log that is removed behind its second entry."""

    def __init__(self) -> None:
        self._left = [StreamEntry(sequence=each, time_ns=each, subject=SUBJECTS.episode("e"), payload=b"x") for each in (2, 1)]

    @asynccontextmanager
    async def read(self, subjects: list[str], *, start: int) -> AsyncIterator[Removed]:
        yield self

    async def receive(self) -> StreamEntry:
        await anyio.lowlevel.checkpoint()
        if not self._left:
            raise BusError("stream fb_followed does not exist")
        return self._left.pop()


async def test_a_log_that_is_removed_leaves_a_closed_file_with_what_was_read_and_one_line(tmp_path: Path) -> None:
    source = Source(RUN, bus=cast(Bus, Removed()))
    with create_recording(tmp_path / "run.fbrec", RecordingHeader(run=RUN)) as writer:
        problems = await record._follow(Export(writer, redactor=None), source, writer, 1)
    assert problems == ["the log could not be followed behind entry 2: stream fb_followed does not exist"]
    recording = load_recording(tmp_path / "run.fbrec")
    assert [entry.sequence for entry in recording.entries] == [1, 2] and recording.torn == ""
