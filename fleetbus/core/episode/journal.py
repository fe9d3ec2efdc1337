"""A fold of the journal of a step-wise session: its holder, its calls, its end. Pure."""

from collections.abc import Iterable, Iterator

import msgspec

from fleetbus_schemas import SessionAnswer, SessionCall, SessionClaimed, SessionEnded, SessionRecorded, decode
from fleetbus_schemas.session import SessionRefusal

JournalEntry = SessionClaimed | SessionRecorded | SessionEnded


ENTRY_BYTES = 512
"""What an entry takes beside its contents."""


class Records(msgspec.Struct):
    """Calls and their answers as they are stored: hardly any is looked at again, and decoded a value may take 70 times the
    room."""

    packed: list[bytes] = msgspec.field(default_factory=list)

    def __len__(self) -> int:
        return len(self.packed)

    def __getitem__(self, index: int) -> SessionRecorded:
        return decode(SessionRecorded, self.packed[index])

    def __iter__(self) -> Iterator[SessionRecorded]:
        return (decode(SessionRecorded, packed) for packed in self.packed)

    def __reversed__(self) -> Iterator[SessionRecorded]:
        return (decode(SessionRecorded, packed) for packed in reversed(self.packed))


class Journal(msgspec.Struct, kw_only=True):
    """One session so far. ``last_sequence`` is what the next entry has to expect (0: nothing stored yet), ``size_bytes`` what
    its entries take."""

    last_sequence: int = 0
    size_bytes: int = 0
    claim: SessionClaimed | None = None
    records: Records = msgspec.field(default_factory=Records)
    ended: SessionEnded | None = None
    recorded: dict[str, int] = msgspec.field(default_factory=dict)
    """The newest of `records` by the key of its call: every call is looked up, however long the session is."""

    @property
    def next_number(self) -> int:
        """The position of the next call."""
        return len(self.records)

    def without_records(self) -> "Journal":
        """The same without its calls: who holds it may claim, and restore nothing."""
        return msgspec.structs.replace(self, records=Records(), recorded={})

    def apply(self, sequence: int, entry: JournalEntry, packed: bytes) -> None:
        """Take in the next stored entry, ``packed`` as it was stored. What follows a tombstone changes nothing."""
        self.last_sequence = sequence
        if self.ended is not None:
            return
        self.size_bytes += len(packed) + ENTRY_BYTES
        match entry:
            case SessionClaimed():
                self.claim = entry
            case SessionRecorded():
                self.recorded[entry.call.key] = len(self.records)
                self.records.packed.append(packed)
                self.ended = _find_end(entry)
            case _:
                self.ended = entry

    def answer(self, call: SessionCall) -> SessionAnswer | None:
        """The answer to this call without executing anything: stored, refused, or None if it is to be executed."""
        number = self.recorded.get(call.key)
        if number is not None:
            record = self.records[number]
            if not is_same_call(record.call, call):
                return build_refusal(call, "conflict", _CONFLICT)
            return msgspec.structs.replace(record.answer, session=call.session, key=call.key)  # whatever was stored there
        if self.ended is not None:
            return self._answer_after_end(call, self.ended)
        if self.claim is None and call.call != "open":
            error = f"session {call.session} is not in the log: it was never opened, or it ended and has left"
            return build_refusal(call, "unknown", error)
        if 0 <= call.number != self.next_number:
            return build_refusal(call, "gap", f"call {call.number} is not the next one, which is {self.next_number}")
        if self.next_number and call.call == "open":
            return build_refusal(call, "conflict", "the session is open already: name another")
        return None

    def _answer_after_end(self, call: SessionCall, ended: SessionEnded) -> SessionAnswer:
        if call.call == "close" or (ended.key and ended.key == call.key):
            answer = SessionAnswer(session=call.session, key=call.key, error=ended.error, worker=ended.worker)
        else:
            answer = build_refusal(call, "closed", f"session {call.session} is over: {ended.end}")
        return msgspec.structs.replace(answer, end=ended.end, error_class=ended.error_class)


def _find_end(record: SessionRecorded) -> SessionEnded | None:
    """A call whose answer ends the session is its tombstone too."""
    answer = record.answer
    if answer.end is None:
        return None
    return SessionEnded(
        session=record.session,
        end=answer.end,
        key=answer.key,
        error_class=answer.error_class,
        error=answer.error,
        worker=answer.worker,
    )


_CONFLICT = "another call was made under this key"


def read_journal(entries: Iterable[tuple[int, JournalEntry, bytes]]) -> Journal:
    """The journal from its entries (sequence, message, payload) in order of the log."""
    journal = Journal()
    for sequence, entry, packed in entries:
        journal.apply(sequence, entry, packed)
    return journal


def is_same_call(left: SessionCall, right: SessionCall) -> bool:
    """True if two calls under one key ask for the same: how long the caller waits, and positions, do not count."""
    return _strip_position(left) == _strip_position(right)


def _strip_position(call: SessionCall) -> SessionCall:
    return msgspec.structs.replace(call, wait_seconds=0.0, number=-1, earliest_sequence=0)


def build_refusal(call: SessionCall, refusal: SessionRefusal, error: str) -> SessionAnswer:
    """The answer to a call that is not executed."""
    return SessionAnswer(session=call.session, key=call.key, refusal=refusal, error=error)
