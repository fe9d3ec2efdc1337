"""Finds the entry of a backup from which on a run needs its log, to restore no more than that. It reads all of the backup."""

from __future__ import annotations

from collections.abc import AsyncIterator

from fleetbus.bus.base import StreamEntry
from fleetbus.core.training.retention import Retention, SessionRetention
from fleetbus_workers.recorder.log_trimmer import decode_entry, ends_session


async def find_first_needed(entries: AsyncIterator[StreamEntry]) -> int:
    """The sequence from which on everything has to be there: as a recorder's retention has it, with nothing read later."""
    retention, sessions, last = Retention(), SessionRetention(), 0
    async for entry in entries:
        message, last = decode_entry(entry), entry.sequence
        if entry.subject.split(".", 3)[2] == "session":
            sessions.enter(entry.sequence, entry.subject.rpartition(".")[2], is_over=ends_session(message))
        else:
            retention.enter(entry.sequence, entry.subject, message)
    return max(1, min(retention.find_archive_floor(), sessions.compute_prefix(last)))
