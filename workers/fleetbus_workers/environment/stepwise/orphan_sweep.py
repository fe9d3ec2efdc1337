"""Ends orphaned sessions: their worker has exited and their client has not called since. They get a tombstone.

A hosted session ends at its own idle limit, so one without entries for longer than that and its longest call is orphaned. Every
worker sweeps; compare-and-set lets one of them write, and none of them if the session has moved.
"""

from collections.abc import Awaitable, Callable

import anyio
import structlog

from fleetbus.bus.base import LogBus
from fleetbus.config.settings import LimitSettings
from fleetbus.core.episode.journal import Journal
from fleetbus.errors import BusClosed, BusError, SequenceConflict
from fleetbus_schemas import SessionEnded, SessionRecorded, Subjects, encode
from fleetbus_workers.environment.stepwise.journal_log import decode_journal_entry, read_session_journal

MARGIN_SECONDS = 60.0
MOST_KEYS = 1000
"""Of environments, which are named in journals: so many answers are remembered."""

log = structlog.get_logger()


class OrphanSweep:
    """Follows the journals of a run; ``open`` holds the last sequence and time of each session that has not ended. ``release``
    is called with each journal that got its tombstone here: its environment may hold something elsewhere. ``find_step_seconds``
    says how long a step of a session's environment may take; it makes one, on this loop, and is asked once per key."""

    def __init__(
        self,
        bus: LogBus,
        subjects: Subjects,
        *,
        worker: str,
        limits: LimitSettings,
        release: Callable[[Journal], Awaitable[None]],
        find_step_seconds: Callable[[Journal], float],
    ) -> None:
        self._bus = bus
        self._subjects = subjects
        self._worker = worker
        self._release = release
        self._idle_seconds = limits.idle
        self._find_step_seconds = find_step_seconds
        self._step_seconds: dict[str, float] = {}
        self._orphan_seconds = limits.idle + max(limits.open, limits.reset, limits.step, limits.verify) + MARGIN_SECONDS
        self._position = 1
        self._open: dict[str, tuple[int, int]] = {}
        self._unanswered: set[str] = set()
        """Those whose tombstone may be stored without this process knowing: once it is read, what they hold is released."""

    async def run(self) -> None:
        """Sweep until cancelled; after a bus error the next interval retries."""
        while True:
            await anyio.sleep(self._orphan_seconds / 4)
            try:
                await self._read_journals()
                await self._end_orphans()
            except BusClosed:
                raise
            except BusError as error:
                log.warning("orphan sweep failed; retrying at the next interval", reason=str(error))

    async def _read_journals(self) -> None:
        async for entry in self._bus.scan([self._subjects.session("*")], start=self._position):
            session = entry.subject.rpartition(".")[2]
            message = decode_journal_entry(entry)
            if isinstance(message, SessionEnded) or (isinstance(message, SessionRecorded) and message.answer.end is not None):
                self._open.pop(session, None)
                if session in self._unanswered and isinstance(message, SessionEnded) and message.worker == self._worker:
                    await self._release(await read_session_journal(self._bus, self._subjects, session))
                self._unanswered.discard(session)
            else:
                self._open[session] = (entry.sequence, entry.time_ns)
            self._position = entry.sequence + 1

    async def _end_orphans(self) -> None:
        latest_ns = self._bus.now_ns() - int(self._orphan_seconds * 1e9)
        for session, (sequence, time_ns) in list(self._open.items()):
            if time_ns < latest_ns and await self._end(session, sequence, time_ns):  # the log refuses all, or none
                self._open.pop(session)  # a newer entry is read with the next sweep

    async def _end(self, session: str, sequence: int, time_ns: int) -> bool:
        """Store its tombstone, if its last entry is still that one; False if it may still be in a step."""
        entry = SessionEnded(
            session=session, end="orphaned", error="no client called it within the limits", worker=self._worker
        )
        try:
            journal = await read_session_journal(self._bus, self._subjects, session)
            longest_seconds = self._idle_seconds + self._recall_step_seconds(journal) + MARGIN_SECONDS
            if self._bus.now_ns() - time_ns <= longest_seconds * 1e9:
                return False
            self._unanswered.add(session)
            await self._bus.publish(self._subjects.session(session), encode(entry), expected_last=sequence)
            self._unanswered.discard(session)
            await self._release(journal)
        except SequenceConflict:
            log.debug("session journal has changed; leaving it", session=session)
        return True

    def _recall_step_seconds(self, journal: Journal) -> float:
        if journal.claim is None:
            return self._find_step_seconds(journal)
        key = journal.claim.task.env
        if key not in self._step_seconds:
            if len(self._step_seconds) >= MOST_KEYS:
                self._step_seconds.clear()
            self._step_seconds[key] = self._find_step_seconds(journal)
        return self._step_seconds[key]
