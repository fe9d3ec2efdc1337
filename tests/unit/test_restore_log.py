"""A log that is restored entry by entry: each at its position, interrupted and repeated, and never into another log."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from fleetbus.audit.run import audit_run
from fleetbus.bus.base import Bus, StreamEntry
from fleetbus.bus.memory import MemoryBus, MemoryServer
from fleetbus.bus.streams import plan_run
from fleetbus.core.training.retention import KEPT_CHECKPOINTS
from fleetbus.errors import UserError
from fleetbus.log.restore import Restored, restore_log
from fleetbus.recording.format import RecordingHeader
from fleetbus.recording.writer import create_recording
from fleetbus_workers.cli.program import run_program
from fleetbus_workers.recorder.needed_entries import find_first_needed
from tests.support.log_builder import SUBJECTS, kinds, read_entries
from tests.unit.test_archive_retention import build_run

ENTRIES = read_entries(build_run(2 * KEPT_CHECKPOINTS))


async def replayed(entries: Sequence[StreamEntry], *, cut: int = 0) -> AsyncGenerator[StreamEntry]:
    for entry in entries:
        if cut and entry.sequence > cut:
            raise ConnectionError
        yield entry


async def restored(bus: Any, *, begins: int = 1, cut: int = 0, entries: Sequence[StreamEntry] = ENTRIES) -> Restored:
    return await restore_log(cast(Bus, bus), plan_run("run", lanes=1), replayed(entries, cut=cut), begins=begins)


async def read_all(bus: MemoryBus) -> list[tuple[int, str, bytes]]:
    return [(each.sequence, each.subject, each.payload) async for each in bus.scan([SUBJECTS.log])]


async def test_a_restore_that_was_interrupted_goes_on_behind_what_it_stored() -> None:
    async with MemoryServer().connect("run") as bus:
        with pytest.raises(ConnectionError):
            await restored(bus, cut=40)
        assert (await bus.log_state()).last_sequence == 40
        facts = await restored(bus)
        assert (facts.begins, facts.last, facts.stored) == (1, len(ENTRIES), len(ENTRIES) - 40)
        assert await read_all(bus) == [(each.sequence, each.subject, each.payload) for each in ENTRIES]
        assert (await restored(bus)).stored == 0
        assert (await audit_run(bus, SUBJECTS)).balanced


async def test_what_a_run_still_needs_is_restored_alone_at_its_positions_and_the_audit_says_what_is_gone() -> None:
    needed = await find_first_needed(replayed(ENTRIES))
    assert len(ENTRIES) // 3 < needed < len(ENTRIES)
    async with MemoryServer().connect("run") as bus:
        facts = await restored(bus, begins=needed)
        assert (facts.begins, facts.stored) == (needed, len(ENTRIES) - needed + 1)
        assert (await read_all(bus))[0] == (needed, ENTRIES[needed - 1].subject, ENTRIES[needed - 1].payload)
        report = await audit_run(bus, SUBJECTS)
    assert kinds(report) == {}
    assert (report.begins, report.balanced) == (needed, False)


async def test_another_log_of_the_run_is_left_as_it_is() -> None:
    async with MemoryServer().connect("run") as bus:
        await restored(bus, entries=ENTRIES[:40])
        others = [*ENTRIES[:39], msgspec.structs.replace(ENTRIES[39], payload=b"other"), *ENTRIES[40:]]
        with pytest.raises(UserError, match="run run has another log on this server, up to entry 40"):
            await restored(bus, entries=others)
        with pytest.raises(UserError, match="run run has another log on this server, up to entry 40"):
            await restored(bus, entries=ENTRIES[:20])
        assert (await bus.log_state()).last_sequence == 40


async def test_a_gap_is_not_closed_and_nothing_is_no_backup() -> None:
    async with MemoryServer().connect("run") as bus:
        with pytest.raises(UserError, match=r"entries 31 to 33 are missing in what is to be restored: .*, or begin .*--only"):
            await restored(bus, entries=[*ENTRIES[:30], *ENTRIES[33:]])
        assert (await bus.log_state()).last_sequence == 30
    async with MemoryServer().connect("run") as bus:
        with pytest.raises(UserError, match="there is no entry to restore"):
            await restored(bus, entries=[])


async def test_a_gap_behind_the_first_entry_that_is_needed_is_not_to_be_left_out_by_what_was_given() -> None:
    async with MemoryServer().connect("run") as bus:
        entries = replayed([*ENTRIES[:30], *ENTRIES[33:]])
        with pytest.raises(UserError, match=r"add the folder or store that has them$"):
            await restore_log(cast(Bus, bus), plan_run("run", lanes=1), entries, begins=21, only_needed=True)


async def test_who_writes_meanwhile_ends_it() -> None:
    async with MemoryServer().connect("run") as bus:

        async def disturbed() -> AsyncGenerator[StreamEntry]:
            for entry in ENTRIES:
                if entry.sequence == 10:
                    await bus.publish(SUBJECTS.session("s"), b"x")
                yield entry

        with pytest.raises(UserError, match="entry 10 was stored at 11, because another process writes"):
            await restore_log(cast(Bus, bus), plan_run("run", lanes=1), disturbed(), begins=1)


async def test_a_log_without_room_says_how_far_it_came() -> None:
    async with MemoryServer().connect("run") as bus:
        with pytest.raises(UserError, match=r"the log of run run is full at entry \d+: raise --nats-max-bytes and repeat"):
            await restore_log(cast(Bus, bus), plan_run("run", lanes=1, max_bytes=9000), replayed(ENTRIES), begins=1)


@pytest.mark.parametrize(
    ("header", "why"),
    [({"redacted": True}, "secrets were taken out"), ({"redacted": False, "selected": ("e",)}, "some of the")],
)
def test_a_recording_of_part_of_it_is_no_backup(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], header: dict[str, Any], why: str
) -> None:
    file = tmp_path / "run.fbrec"
    with create_recording(file, RecordingHeader(run="run", **header)):
        pass
    assert run_program(["restore", str(file), "--run", "run", "--nats", "nats://127.0.0.1:9"]) == 2
    assert why in capsys.readouterr().err
