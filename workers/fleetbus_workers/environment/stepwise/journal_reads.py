"""Journals of sessions that a worker does not hold, read from the log, a few at a time.

Above it is the host, which claims by what it finds here; below it the log. A read that waits for a replica of the log keeps no
journal meanwhile: it may be long, and so may the wait (docs/decisions/0265).
"""

import anyio
import structlog

from fleetbus.core.episode.journal import Journal
from fleetbus.log.actions import LAG_PAUSES_SECONDS
from fleetbus.log.floor import read_floor_after
from fleetbus_schemas import SessionCall
from fleetbus_workers.environment.episode.stages import Superseded
from fleetbus_workers.environment.stepwise.journal_log import LogUnavailable, read_session_journal
from fleetbus_workers.environment.worker_context import WorkerContext

READS_AT_ONCE = 4
"""Journals of sessions that are not here."""

log = structlog.get_logger()


class JournalReads:
    """Reads for one host."""

    def __init__(self, context: WorkerContext) -> None:
        self._context = context
        self._reads = anyio.Semaphore(READS_AT_ONCE)

    async def read(self, call: SessionCall) -> Journal:
        """At least what the caller of ``call`` knows: the replica that answers may be behind that."""
        for pause in LAG_PAUSES_SECONDS:
            journal = await self._read(call.session)
            if call.call == "open" or (journal.claim is not None and journal.next_number >= call.number):
                return journal
            del journal
            await anyio.sleep(pause)
        return await self._read(call.session)

    async def read_claimed(self, session: str, sequence: int) -> Journal:
        """The journal whose last entry is the claim at ``sequence``.

        Raises `Superseded` if something follows it, `LogUnavailable` if no replica that answers has it.
        """
        for pause in (*LAG_PAUSES_SECONDS, 0.0):
            journal = await self._read(session)
            if journal.last_sequence == sequence:
                return journal
            if journal.last_sequence > sequence:
                raise Superseded(f"session {session} was claimed by somebody else")
            del journal
            await anyio.sleep(pause)
        raise LogUnavailable("the replica of the log that answers is behind")

    async def is_below_floor(self, call: SessionCall, claim_sequence: int) -> bool:
        """True if a claim without a recorded call before it came after the session may have ended and left the log: nobody may
        act upon it."""
        context = self._context
        subject = context.subjects.session(call.session)
        floor = await read_floor_after(context.bus, context.subjects, subject, claim_sequence)
        if not 0 < call.earliest_sequence < floor.sessions:
            return False
        log.warning("call is below the floor of the log; refusing it", session=call.session)
        return True

    async def _read(self, session: str) -> Journal:
        async with self._reads:
            return await read_session_journal(self._context.bus, self._context.subjects, session)
