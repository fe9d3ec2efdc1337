"""Journals that nobody will ever go on with: their worker is gone, their client never came back. They get a tombstone.

A session that lives somewhere ends by its own idle limit, so what has been silent for longer belongs to nobody. Every worker
looks; compare-and-set lets one of them write, and none of them if the session moves after all.
"""

from __future__ import annotations

import anyio
import structlog

from fleetbus.bus.base import Bus
from fleetbus.config.settings import LimitSettings
from fleetbus.errors import BusClosed, BusError, SequenceConflict
from fleetbus_schemas import SessionEnded, SessionRecorded, Subjects, encode
from fleetbus_workers.environment.stepwise.journal import journal_entry

MARGIN_SECONDS = 60.0

log = structlog.get_logger()


class OrphanSweep:
    """Follows the journals of a run; ``open`` holds the last sequence and time of each session that has not ended."""

    def __init__(self, bus: Bus, subjects: Subjects, *, worker: str, limits: LimitSettings) -> None:
        self._bus = bus
        self._subjects = subjects
        self._worker = worker
        self._silent_seconds = limits.idle + max(limits.open, limits.reset, limits.step, limits.verify) + MARGIN_SECONDS
        self._position = 1
        self._open: dict[str, tuple[int, int]] = {}

    async def run(self) -> None:
        """For ever; a bus that is away is asked again the next time."""
        while True:
            await anyio.sleep(self._silent_seconds / 4)
            try:
                await self._follow()
                await self._bury()
            except BusClosed:
                raise
            except BusError as error:
                log.warning("sessions not swept", reason=str(error))

    async def _follow(self) -> None:
        async for entry in self._bus.scan([self._subjects.session("*")], start=self._position):
            self._position = entry.sequence + 1
            session = entry.subject.rpartition(".")[2]
            message = journal_entry(entry)
            if isinstance(message, SessionEnded) or (isinstance(message, SessionRecorded) and message.answer.end is not None):
                self._open.pop(session, None)
            else:
                self._open[session] = (entry.sequence, entry.time_ns)

    async def _bury(self) -> None:
        latest_ns = self._bus.now_ns() - int(self._silent_seconds * 1e9)
        for session, (sequence, time_ns) in list(self._open.items()):
            if time_ns < latest_ns:
                entry = SessionEnded(session=session, end="orphaned", error="nobody came back for it", worker=self._worker)
                self._open.pop(session)  # whoever wrote in the meantime is read with the next sweep
                try:
                    await self._bus.publish(self._subjects.session(session), encode(entry), expected_last=sequence)
                except SequenceConflict:
                    log.debug("session lives on, or was swept by another worker", session=session)
