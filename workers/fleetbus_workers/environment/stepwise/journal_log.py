"""The journal of a session, read from and written to the log by compare-and-set."""

import anyio
import structlog

from fleetbus.bus.base import LogBus, StreamEntry
from fleetbus.concurrency.loop_clock import get_clock
from fleetbus.core.episode.journal import Journal, JournalEntry, read_journal
from fleetbus.errors import LogFull, PublishUnanswered, RequestUnanswered, SequenceConflict
from fleetbus.log.episodes import read_entry
from fleetbus_schemas import Subjects, encode
from fleetbus_schemas.channels import STORED
from fleetbus_workers.environment.episode.stages import Superseded

RETRY_SECONDS = 0.5
PUBLISH_SECONDS = 30.0
STORE_SECONDS = 60.0
"""How long an entry waits for the log before its session is given up here."""

log = structlog.get_logger()


class LogUnavailable(Exception):
    """The log took nothing for too long; the message says why."""


async def read_session_journal(bus: LogBus, subjects: Subjects, session: str) -> Journal:
    """Everything about one session, as of now."""
    entries = await bus.history([subjects.session(session)])
    decoded = ((entry.sequence, decode_journal_entry(entry), entry.payload) for entry in entries)
    return read_journal((sequence, message, payload) for sequence, message, payload in decoded if message is not None)


def decode_journal_entry(entry: StreamEntry) -> JournalEntry | None:
    """The claim, call or tombstone in an entry of ``session.<session>``; None if it is none of them."""
    message = read_entry(STORED["session"], entry)
    assert message is None or isinstance(message, JournalEntry)
    return message


async def append(bus: LogBus, subjects: Subjects, session: str, journal: Journal, entry: JournalEntry) -> None:
    """Store the next entry and take it into ``journal``; full logs and lost acks are waited out for `STORE_SECONDS`.

    Raises `Superseded` when somebody else wrote first, `LogUnavailable` when the time is up.
    """
    now = get_clock()
    give_up_at = now() + STORE_SECONDS
    subject = subjects.session(session)
    payload = encode(entry, subject=subject)
    while True:
        try:
            left = give_up_at - now()
            sequence = await _publish_entry(bus, subject, payload, journal.last_sequence, min(left, PUBLISH_SECONDS))
        except (LogFull, PublishUnanswered, RequestUnanswered) as error:
            problem = "the log is full" if isinstance(error, LogFull) else str(error)
            if now() + RETRY_SECONDS >= give_up_at:
                raise LogUnavailable(f"{problem}, for {STORE_SECONDS:g} s") from error
            log.warning("journal write failed; retrying", session=session, reason=str(error))
            await anyio.sleep(RETRY_SECONDS)
        else:
            journal.apply(sequence, entry, payload)
            return


async def _publish_entry(bus: LogBus, subject: str, payload: bytes, expected_last: int, timeout: float) -> int:
    """Publish an entry and return its sequence, stored now or by an earlier try whose answer was lost."""
    try:
        return (await bus.publish(subject, payload, expected_last=expected_last, timeout=timeout)).sequence
    except SequenceConflict:
        stored = await bus.last(subject)
        if stored is None or stored.payload != payload:
            raise Superseded(f"{subject} was written by somebody else") from None
        return stored.sequence
