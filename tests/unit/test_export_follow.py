"""A log that is followed: one that reads slower than others write has all of it in the end."""

from __future__ import annotations

from pathlib import Path

import anyio

from fleetbus.bus.memory import MemoryServer
from fleetbus.bus.streams import plan_run
from fleetbus.recording import load_recording
from fleetbus.recording.export import END_SECONDS, Export
from fleetbus.recording.format import RecordingHeader, compute_message_schema
from fleetbus.recording.writer import create_recording
from fleetbus_schemas import Subjects
from tests.support.virtual_time import virtual_time

RUN = "followed"
SUBJECTS = Subjects(RUN)
ENTRIES = 3000

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
