"""Operations that have no log to go to: noted in a folder, bounded, and stored in the log that comes next."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from fleetbus.bus.memory import MemoryServer
from fleetbus.bus.streams import plan_run
from fleetbus.config.settings import Configuration, NatsSettings, RunSettings
from fleetbus.core.audit.operations import Operations
from fleetbus.log.operations import ENDING, KEPT_NOTES, describe_operation, note_operation, store_noted
from fleetbus.log.stored_entries import read_stored
from fleetbus_schemas import OperationRecorded, Subjects
from fleetbus_workers.cli.program import run_program
from fleetbus_workers.command.noted_operations import note_purge, store_notes

RUN = "noted"
SUBJECTS = Subjects(RUN)


async def read_operations(server: MemoryServer) -> Operations:
    found = Operations()
    async with server.connect(RUN, worker="reader") as bus:
        async for entry in bus.scan([SUBJECTS.operations]):
            if isinstance(message := read_stored(entry), OperationRecorded):
                found.apply(message, entry.sequence, entry.subject, entry.time_ns)
    return found


def note(folder: Path, number: int) -> None:
    note_operation(folder, RUN, "UADMIN", describe_operation("rotate", [f"user-{number}"], "test", at_ns=number))


@pytest.mark.integration
async def test_notes_are_of_their_owner_alone_bounded_and_stored_once(tmp_path: Path) -> None:
    server = MemoryServer()
    for number in range(KEPT_NOTES + 2):
        note(tmp_path, number + 1)
    file = tmp_path / f"{RUN}{ENDING}"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    async with server.connect(RUN, worker="init") as bus:
        await bus.declare(plan_run(RUN, lanes=1))
        assert await store_noted(bus, SUBJECTS, tmp_path) == KEPT_NOTES
        assert await store_noted(bus, SUBJECTS, tmp_path) == 0
    assert not file.exists()
    found = await read_operations(server)
    newest = found.newest[-1]
    assert (found.counted, newest.role, newest.key, newest.at_ns) == (KEPT_NOTES, "admin", "UADMIN", KEPT_NOTES + 2)


async def test_a_file_that_cannot_be_read_and_keys_that_are_none_stop_nobody(tmp_path: Path) -> None:
    server, file = MemoryServer(), tmp_path / f"{RUN}{ENDING}"
    async with server.connect(RUN, worker="init") as bus:
        await bus.declare(plan_run(RUN, lanes=1))
        for content in (b"\xff", b"[1]", b'[{"key": "a.b.>", "entry": ""}]', b'[{"key": "UA", "entry": "AAAA"}]'):
            file.write_bytes(content)
            await store_noted(bus, SUBJECTS, tmp_path)
            note(tmp_path, 7)
            assert await store_noted(bus, SUBJECTS, tmp_path) >= 1
            assert not file.exists()
    assert (await read_operations(server)).counted == 4


async def test_a_run_that_was_removed_stands_in_the_log_of_the_next_one(tmp_path: Path) -> None:
    (tmp_path / RUN / "checkpoints").mkdir(parents=True)
    assert run_program(["runs", "rm", RUN, "--yes", "--run-folder", str(tmp_path)]) == 0
    assert not (tmp_path / RUN).exists()
    server, configuration = MemoryServer(), Configuration(run=RunSettings(name=RUN, folder=str(tmp_path)))
    async with server.connect(RUN, worker="up") as bus:
        await bus.declare(plan_run(RUN, lanes=1))
        assert await store_notes(bus, configuration) == 1
    (removed,) = (await read_operations(server)).newest
    assert (removed.operation, removed.targets, removed.key) == ("purge", (RUN,), "none")
    assert " admin without a key purge noted (says runs-" in removed.line


async def test_a_removal_on_another_server_is_not_told_of_the_run_here(tmp_path: Path) -> None:
    run = RunSettings(name=RUN, folder=str(tmp_path))
    here, there = (Configuration(run=run, nats=NatsSettings(url=url)) for url in ("", "nats://me:secret@there:4222"))
    note_purge(there, RUN, author="test")
    assert "secret" not in (tmp_path / f"{RUN}{ENDING}").read_text()
    note(tmp_path, 1)
    server = MemoryServer()
    async with server.connect(RUN, worker="up") as bus:
        await bus.declare(plan_run(RUN, lanes=1))
        assert await store_notes(bus, here) == 1
        assert (await read_operations(server)).newest[-1].operation == "rotate"
        assert await store_notes(bus, there) == 1
    assert (await read_operations(server)).newest[-1].operation == "purge"
    assert not (tmp_path / f"{RUN}{ENDING}").exists()
