"""A log that is followed: one that reads slower than others write has all of it in the end."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import anyio
import pytest

from fleetbus.bus.memory import MemoryServer
from fleetbus.bus.streams import plan_run
from fleetbus.recording import load_recording
from fleetbus.recording.export import BUSY_ENTRIES, END_SECONDS, Export
from fleetbus.recording.format import RecordingHeader, compute_message_schema
from fleetbus.recording.writer import create_recording
from fleetbus_schemas import Subjects
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
