"""The floor of a log as a worker reads it, so that no read that lags makes something happen twice.

A claim on a subject without entries may be the first, or come after everything there was has left the log. Compare-and-set
cannot tell; the floor can, for it is raised before anything leaves. Above it are the workers that claim; below it the bus.
"""

import anyio
import structlog

from fleetbus.bus.base import LogBus
from fleetbus.core.training.floor import NO_FLOOR
from fleetbus.errors import LogFull, LogLost, PublishUnanswered, RequestUnanswered, SequenceConflict
from fleetbus.log.episodes import RETRY_SECONDS, read_entry
from fleetbus_schemas import FloorRaised, Subjects, encode
from fleetbus_schemas.channels import STORED

log = structlog.get_logger()


async def read_floor(bus: LogBus, subjects: Subjects) -> FloorRaised:
    """The floor as some replica of the log knows it: it may be higher by now, never lower."""
    stored = await bus.last(subjects.floor)
    floor = read_entry(STORED["floor"], stored) if stored is not None else None
    return floor if isinstance(floor, FloorRaised) else NO_FLOOR


async def fence_floor(bus: LogBus, subjects: Subjects) -> FloorRaised:
    """The floor, stored once more as it stands: what raises it later has read the log up to here, for it expects that entry.

    Without any floor nobody raises one before it has read up to the first. The caller's cancel scope is what ends it.
    """
    while True:
        try:
            stored = await bus.last(subjects.floor)
            floor = read_entry(STORED["floor"], stored) if stored is not None else NO_FLOOR
            if stored is not None and isinstance(floor, FloorRaised):
                await bus.publish(subjects.floor, encode(floor), expected_last=stored.sequence)
            return floor if isinstance(floor, FloorRaised) else NO_FLOOR
        except SequenceConflict:
            log.info("floor was raised meanwhile; reading it again")
        except (LogFull, PublishUnanswered, RequestUnanswered) as error:
            log.warning("floor publish failed; retrying", reason=str(error))
        await anyio.sleep(RETRY_SECONDS)


async def read_floor_after(bus: LogBus, subjects: Subjects, subject: str, sequence: int) -> FloorRaised:
    """The floor as of the entry at ``sequence``, which stands or stood on ``subject``, or later.

    It is read from one state of the log that has that entry; asked again, however long it takes, while a replica answers that
    does not have it yet. The caller's cancel scope is what ends it. Raises `LogLost` if the log has lost the entry.
    """
    while True:
        try:
            found = {entry.subject: entry for entry in await bus.last_of_each((subjects.floor, subject))}
            is_there = subject in found and found[subject].sequence >= sequence
            is_lost = not is_there and await _is_lost(bus, subjects, subject, sequence)
        except RequestUnanswered as unanswered:
            log.warning("floor read failed; retrying", subject=subject, reason=str(unanswered))
        else:
            stored = found.get(subjects.floor)
            floor = read_entry(STORED["floor"], stored) if stored is not None else None
            raised = floor if isinstance(floor, FloorRaised) else NO_FLOOR
            if is_there or sequence < raised.sequence:
                return raised
            if is_lost:
                raise LogLost(f"entry {sequence} on {subject} is not there any more: the server lost entries")
        await anyio.sleep(RETRY_SECONDS)


async def _is_lost(bus: LogBus, subjects: Subjects, subject: str, sequence: int) -> bool:
    """True if the log ends before that position, or has given it to something else. A replica that lags says neither."""
    if (await bus.log_state()).last_sequence < sequence:
        return True
    found = await bus.next_entry(subjects.log, start=sequence)
    return found is not None and found.sequence == sequence and found.subject != subject
