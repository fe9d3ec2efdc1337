"""The learner's entries on ``train.<name>`` and ``policy.<name>``, each expecting the last (delivery rule 8).

A learner whose append is refused has been replaced by another and stops.
"""

import anyio
import structlog

from fleetbus.bus.base import LogBus, StreamEntry
from fleetbus.core.training.lineage import lineage_number
from fleetbus.errors import LogFull, PublishUnanswered, RequestUnanswered, SequenceConflict, TakenOver
from fleetbus.log.episodes import decode_entries, read_entry
from fleetbus_schemas import (
    CheckpointStored,
    EvaluationFinished,
    LineageStarted,
    Message,
    PolicyPublished,
    StepTrained,
    TrainingFinished,
    encode,
)
from fleetbus_schemas.stored import STORED

RETRY_SECONDS = 1.0

OTHER_ENTRIES = (StepTrained, CheckpointStored, EvaluationFinished, TrainingFinished)
"""What stands on ``train.<name>`` beside the beginnings of learners."""

log = structlog.get_logger()


class LearnerReplaced(TakenOver):
    """Another learner has appended since: this one must stop training."""


class FencedAppender:
    """One subject that a single author appends to; ``last`` is the sequence of the newest entry."""

    def __init__(self, bus: LogBus, subject: str, last: int) -> None:
        self._bus = bus
        self._subject = subject
        self._unconfirmed = b""
        """An entry whose answer was not waited for: it may be the last one."""
        self.last = last
        self._lock = anyio.Lock()

    async def append(self, message: Message) -> int:
        """Store the next entry, however long it takes, and return its sequence; raises `LearnerReplaced`.

        Cancelled, it may have stored it: what is appended next follows it then.
        """
        payload = encode(message, subject=self._subject)
        async with self._lock:
            try:
                return await self._append(payload)
            except anyio.get_cancelled_exc_class():
                self._unconfirmed = payload
                raise

    async def take_over(self, started: LineageStarted) -> None:
        """Store the start of a lineage after whatever stands there by now: from then on the author before is refused.

        Raises `LearnerReplaced` when a later lineage has written there, so lineages follow each other in their order on this
        subject
        as well, however old an answer of the log is: what is written upon an old one is refused.
        """
        while True:
            stored = await self._bus.last(self._subject)
            message = read_entry(STORED["policy"], stored) if stored is not None else None
            assert message is None or isinstance(message, (LineageStarted, PolicyPublished))
            if message is not None and lineage_number(message.lineage) > lineage_number(started.lineage):
                raise LearnerReplaced(f"lineage {message.lineage} writes to {self._subject}")
            self.last = stored.sequence if stored is not None else 0
            try:
                await self.append(started)
                return
            except LearnerReplaced:
                continue

    async def watch(self) -> None:
        """For ever: raise `LearnerReplaced` when another learner begins; one without anything to append would not notice
        otherwise."""
        async with self._bus.read([self._subject], start=self.last + 1) as reader:
            while True:
                if decode_entries(LineageStarted, [await reader.receive()], beside=OTHER_ENTRIES):
                    raise LearnerReplaced(f"another learner began on {self._subject}")

    async def _append(self, payload: bytes) -> int:
        while True:
            try:
                self.last = (await self._bus.publish(self._subject, payload, expected_last=self.last)).sequence
                return self.last
            except SequenceConflict as refused:
                conflict = refused
            except (LogFull, PublishUnanswered) as error:
                log.warning("entry publish failed; retrying", subject=self._subject, reason=str(error))
                await anyio.sleep(RETRY_SECONDS)
                continue
            try:
                stored = await self._find_own_entry(payload, conflict)
            except RequestUnanswered as unanswered:
                log.warning("last entry read failed; retrying", subject=self._subject, reason=str(unanswered))
                continue
            self.last = stored.sequence
            if stored.payload == payload:
                return self.last

    async def _find_own_entry(self, payload: bytes, conflict: SequenceConflict) -> StreamEntry:
        """A refusal may be one's own first try, whose answer was lost, or an entry whose answer was not waited for."""
        stored = await self._bus.last(self._subject)
        if stored is None or stored.sequence <= conflict.expected or stored.payload not in (payload, self._unconfirmed):
            raise LearnerReplaced(f"another learner writes to {self._subject}") from conflict
        return stored
