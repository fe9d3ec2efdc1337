"""Reads a run's log, its archive if there is one, or a recording of it into the audit of `fleetbus.core.audit.books`.

Used by the command line and by tests; it only reads.
"""

from collections.abc import AsyncIterator
from pathlib import Path

import msgspec

from fleetbus.audit.state import LogPosition, read_audit_state, write_audit_state
from fleetbus.bus.base import LogBus, StreamEntry
from fleetbus.concurrency.runtime import run_in_thread
from fleetbus.core.audit.books import Audit
from fleetbus.core.audit.findings import Findings, Report
from fleetbus.errors import UserError
from fleetbus.log.archive_reader import find_lost_entries, read_archived_entries, scan_archive, scan_archive_and_log
from fleetbus.log.archive_retention import NOTE, Removed, read_removed
from fleetbus.recording.export import scan_recording
from fleetbus.recording.reader import RecordingReader
from fleetbus_schemas import LineageStarted, MalformedMessage, Subjects
from fleetbus_schemas.channels import STORED
from fleetbus_schemas.message import decode, decode_any

_MESSAGES = {
    kind: STORED[kind] for kind in ("task", "obs", "act", "episode", "session", "policy", "train", "floor", "operation")
}
"""What an audit looks into, by the kind of subject."""


async def audit_run(bus: LogBus, subjects: Subjects, *, archive: Path | None = None, state: Path | None = None) -> Report:
    """The books of a run as of now, which prove only a part where an archive's retention removed the rest. With a file
    ``state`` only what was stored since the audit that wrote it is read, and the file is replaced. That nothing was read, or
    not what the server says that there is, is a finding. Raises `UserError` for a log that was trimmed when no archive is
    given, for the state of another, and for a state behind which entries were removed."""
    known = await run_in_thread(read_audit_state, state, subjects.run) if state is not None else None
    removed = await find_removed(bus, archive)
    audit, position = known or (begin_audit(removed), None)
    if position is not None and position.sequence < removed.below:
        raise UserError(
            f"{state} goes up to entry {position.sequence} of the log of run {subjects.run}, and what can be read begins at "
            f"{removed.below}: retention removed what lies between; remove the file to audit what is left, and then audit more "
            "often"
        )
    log_state, last = await bus.log_state(), None
    if position is not None:
        await _check_position(bus, subjects, position, archive)
    lost = await find_lost_entries(bus, subjects, archive) if archive is not None else []
    if lost and state is not None:
        raise UserError(
            f"the log of run {subjects.run} went back in time to entry {lost[0].sequence}: audit it without --state"
        )
    async for entry in scan_archive_and_log(bus, subjects, archive, start=position.sequence + 1 if position else 1):
        enter(audit, entry)
        last = entry
    if audit.missing and archive is None:
        raise UserError(
            f"{audit.missing} entries of the log of run {subjects.run} were trimmed: give --archive with the recorder's folder"
        )
    if state is not None and last is not None:
        await run_in_thread(write_audit_state, state, subjects.run, audit, LogPosition.of(last))
    for entry in lost:
        audit.enter_lost(entry.sequence, entry.subject)
    audit.enter_end(log_state.last_sequence, log_state.erasing)
    return audit.report()


async def _check_position(bus: LogBus, subjects: Subjects, position: LogPosition, archive: Path | None) -> None:
    """Raise `UserError` unless archive or log has that very entry there."""
    entry = await bus.next_entry(subjects.log, start=position.sequence)
    if archive is not None and (entry is None or entry.sequence > position.sequence):
        found = await run_in_thread(read_archived_entries, archive, (position.sequence,), run=subjects.run)
        entry = found.get(position.sequence, entry)
    if entry is None or LogPosition.of(entry) != position:
        is_trimmed = entry is not None and entry.sequence > position.sequence
        why = (
            "was trimmed: give --archive"
            if is_trimmed
            else "is not that of the state: the log went back in time, or is another"
        )
        raise UserError(f"entry {position.sequence} of the log of run {subjects.run} {why}, or audit it without --state")


async def audit_archive(subjects: Subjects, archive: Path) -> Report:
    """The books of a run as far as its archive goes, without any server."""
    audit = begin_audit(await find_removed(None, archive))
    return (await _audit_entries(audit, scan_archive(archive, run=subjects.run))).report()


async def find_removed(bus: LogBus | None, archive: Path | None) -> Removed:
    """The part that cannot be read any more: nothing unless an archive's retention removed it, or the log was restored from
    the rest of another."""
    begins = (await bus.log_state()).begins if bus is not None else 1
    removed = await run_in_thread(read_removed, archive) if archive is not None else Removed()
    return removed if removed.below >= begins else Removed(below=begins)


def begin_audit(removed: Removed) -> Audit:
    """An audit of a log of which this was removed. Raises `UserError` for a note that nobody wrote here."""
    audit = Audit()
    if removed.below > 1:
        audit.begin_at(removed.below)
        for each in removed.lineages:
            try:
                started = decode(LineageStarted, each.payload, subject=each.subject)
            except MalformedMessage as error:
                raise UserError(f"the archive notes a lineage that is none, {error}: restore {NOTE} from a copy") from error
            audit.begin_with(each.sequence, each.subject.rpartition(".")[2], started)
    return audit


async def audit_recording(reader: RecordingReader) -> Report:
    """The books of a recorded run as far as the recording goes; that one has no end, or is damaged, is a finding. Raises
    `UserError` for a recording of part of a log."""
    header, path = reader.header, reader.path
    if header.selected:
        only = f"{len(header.selected)} episode{'' if len(header.selected) == 1 else 's'}"
        raise UserError(f"{path} contains only {only} of run {header.run}: an audit needs a recording of the whole log")
    try:
        audit = await _audit_entries(begin_audit(Removed(below=header.begins)), scan_recording(reader))
    except ValueError as error:
        raise UserError(f"{path} is not an ordered log: {error}") from error
    if audit.missing:
        raise UserError(
            f"{path} lacks {audit.missing} entries that were trimmed before the recording: record the run with --archive"
        )
    report, findings = audit.report(), Findings()
    if reader.torn:
        findings.add("torn", reader.torn, report.last_sequence)
    return msgspec.structs.replace(report, findings=(*findings.list_found(), *report.findings))


async def _audit_entries(audit: Audit, entries: AsyncIterator[StreamEntry]) -> Audit:
    async for entry in entries:
        enter(audit, entry)
    return audit


def enter(audit: Audit, entry: StreamEntry) -> None:
    """Enter one entry of the log."""
    expected = _MESSAGES.get(entry.subject.split(".", 3)[2])
    if expected is None:
        audit.enter(entry.sequence, entry.subject, None)
        return
    try:
        message = decode_any(expected, entry.payload, subject=entry.subject)
    except MalformedMessage:
        audit.enter_malformed(entry.sequence, entry.subject)
    else:
        audit.enter(entry.sequence, entry.subject, message, entry.time_ns)
