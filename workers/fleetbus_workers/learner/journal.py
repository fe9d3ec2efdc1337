"""The learner's entries on ``train.<name>`` and ``policy.<name>``, each expecting the last.

Rules 8 and 15 of docs/concepts/delivery.md: a learner whose append is refused has been replaced if a newer lineage stands
there, and stops for good. Otherwise the log lost or changed what it had stored: it says what, and ends as a failure.
"""

import anyio
import structlog

from fleetbus.bus.base import LogBus, StreamEntry
from fleetbus.core.training.lineage import lineage_number
from fleetbus.errors import LogFull, LogLost, PublishUnanswered, RequestUnanswered, SequenceConflict, TakenOver
from fleetbus.log.episodes import read_entry
from fleetbus_schemas import (
    CheckpointStored,
    EvaluationFinished,
    LineageStarted,
    PolicyPublished,
    StepTrained,
    TrainingFinished,
    encode,
)
from fleetbus_schemas.channels import STORED

RETRY_SECONDS = 1.0

WAITS_FOR_ROOM = "the log is full, and what was trained waits for room in it"

BEGINNING_CHECKS = 10
"""So often, and as many seconds, a learner that is refused by an entry of its own lineage looks for a newer one."""

JournalEntry = LineageStarted | StepTrained | CheckpointStored | EvaluationFinished | TrainingFinished | PolicyPublished
"""What stands on ``train.<name>`` and ``policy.<name>``."""

log = structlog.get_logger()


class LearnerReplaced(TakenOver):
    """Another learner has appended since: this one must stop training."""


class JournalMoved(Exception):
    """The learner before has written since this one read where training stands: it has to read that again, and begin then."""


class _Refused(Exception):
    """An append was refused, and what stands last is not one's own."""

    def __init__(self, expected: int, stored: StreamEntry | None) -> None:
        super().__init__(f"expected {expected}")
        self.expected = expected
        self.stored = stored


class FencedAppender:
    """One subject that a single author appends to; ``last`` is the sequence of the newest entry. ``lineage`` is the author's
    own; without it that of its entries."""

    def __init__(self, bus: LogBus, subject: str, last: int, *, lineage: str = "") -> None:
        self._bus = bus
        self._subject = subject
        self._unconfirmed = b""
        """An entry whose answer was not waited for: it may be the last one."""
        self._start = b""
        """The beginning of the author's own lineage, once it is stored here."""
        self._own = self._number = lineage_number(lineage)
        self.last = last
        self.problem = ""
        """The reason for which an entry waits, as far as it is known; else empty."""
        self._lock = anyio.Lock()

    async def append(self, message: JournalEntry) -> int:
        """Store the next entry, however long it takes, and return its sequence; raises `LearnerReplaced` or `LogLost`, and
        `JournalMoved` before the author's lineage has begun here.

        Cancelled, it may have stored it: what is appended next follows it then.
        """
        try:
            return await self._append(message)
        except _Refused as refused:
            raise await self._explain(refused) from refused

    async def take_over(self, started: LineageStarted) -> None:
        """Store the start of a lineage after what stands there by now: from then on the author before is refused.

        Raises `LearnerReplaced` when a later lineage has written there, so lineages follow each other in their order on this
        subject as well, however old an answer of the log is: what is written upon an old one is refused.
        """
        self._number = lineage_number(started.lineage)
        while True:
            stored = await self._bus.last(self._subject)
            if stored is not None and self._find_number(stored) > self._number:
                raise LearnerReplaced(f"a later lineage writes to {self._subject}, since entry {stored.sequence}")
            self.last = stored.sequence if stored is not None else 0
            try:
                await self._append(started)
                return
            except _Refused:
                continue

    async def watch(self) -> None:
        """For ever: raise `LearnerReplaced` when another learner begins; one without anything to append would not notice
        otherwise."""
        async with self._bus.read([self._subject], start=self.last + 1) as reader:
            while True:
                self._check_replaced(await reader.receive())

    async def check_replaced(self) -> None:
        """Raise `LearnerReplaced` if the last entry is that of a newer lineage."""
        stored = await self._bus.last(self._subject)
        if stored is not None:
            self._check_replaced(stored)

    def _check_replaced(self, stored: StreamEntry) -> None:
        if self._is_newer(stored):
            raise LearnerReplaced(f"another learner began on {self._subject}: see entry {stored.sequence}")

    async def _append(self, message: JournalEntry) -> int:
        payload = encode(message, subject=self._subject)
        self._number = self._own or lineage_number(message.lineage)
        async with self._lock:
            try:
                sequence = await self._publish(payload)
            except anyio.get_cancelled_exc_class():
                self._unconfirmed = payload
                raise
            finally:
                self.problem = ""
        if isinstance(message, LineageStarted):
            self._start = payload
        return sequence

    async def _publish(self, payload: bytes) -> int:
        while True:
            try:
                self.last = (await self._bus.publish(self._subject, payload, expected_last=self.last)).sequence
                return self.last
            except SequenceConflict as refused:
                conflict = refused
            except (LogFull, PublishUnanswered) as error:
                self.problem = WAITS_FOR_ROOM if isinstance(error, LogFull) else ""
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
            raise _Refused(conflict.expected, stored) from conflict
        return stored

    async def _explain(self, refused: _Refused) -> LearnerReplaced | LogLost | JournalMoved:
        """Only a newer lineage replaces a learner: anything else is the log's doing."""
        subject, stored, expected = self._subject, refused.stored, refused.expected
        if stored is not None and stored.sequence > expected:
            if not self._start and self._find_number(stored) < self._number:
                return JournalMoved(f"{subject} goes on with entry {stored.sequence}")
            stored = await self._wait_for_newer(stored)
        if stored is None:
            return LogLost(
                f"{subject} has no entry any more, and had one at {expected}: it was purged, or the log went back in time"
            )
        if self._is_newer(stored):
            return LearnerReplaced(f"another learner writes to {subject}: see entry {stored.sequence}")
        if stored.sequence < expected:
            return LogLost(
                f"{subject} ends at entry {stored.sequence}, and had one at {expected}: the log went back in time or is damaged"
            )
        return LogLost(
            f"entry {stored.sequence} of {subject} is of no newer learner: the log lost this one's, or somebody else wrote it"
        )

    async def _wait_for_newer(self, stored: StreamEntry) -> StreamEntry:
        """Wait for a newer lineage: who takes over may first announce a checkpoint in the name of the lineage before."""
        for _ in range(BEGINNING_CHECKS):
            if self._is_newer(stored):
                break
            await anyio.sleep(RETRY_SECONDS)
            try:
                stored = await self._bus.last(self._subject) or stored
            except RequestUnanswered as unanswered:
                log.warning("last entry read failed; retrying", subject=self._subject, reason=str(unanswered))
        return stored

    def _is_newer(self, stored: StreamEntry) -> bool:
        """True for what another learner wrote that began after this one: of two with one name the first that began has it."""
        number = self._find_number(stored)
        if number == self._number:
            return not self._start or (self._is_start(stored) and stored.payload != self._start)
        return number > self._number

    def _find_number(self, stored: StreamEntry) -> int:
        message = self._read(stored)
        return lineage_number(message.lineage) if message is not None else 0

    def _is_start(self, stored: StreamEntry) -> bool:
        return isinstance(self._read(stored), LineageStarted)

    def _read(self, stored: StreamEntry) -> JournalEntry | None:
        message = read_entry(STORED[self._subject.split(".", 3)[2]], stored)
        assert message is None or isinstance(message, JournalEntry)
        return message
