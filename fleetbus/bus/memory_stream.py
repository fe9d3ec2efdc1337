"""One stream in memory: entries in order, compare-and-set, the duplicate window, and a limit that refuses.

Plain data without tasks or waiting; the caller says what time it is. Above it are server and buses; consumers and readers hang
on it and hear of every new entry.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

from fleetbus.bus.base import PublishAck, StreamEntry
from fleetbus.bus.memory_subjects import Matcher, SubjectIndex, any_matcher
from fleetbus.bus.streams import StreamPlan
from fleetbus.errors import LogFull, SequenceConflict

StreamFiles = dict[str, Any]
"""What a stream stored."""

ENTRY_BYTES = 90
"""What an entry takes besides subject, payload and id."""


class MemoryStream:
    """Entries by sequence (from 1) and by subject.

    ``on_stored`` are called with each new entry, ``on_matching`` with those whose subject matches.
    """

    def __init__(self, plan: StreamPlan, created: str = "") -> None:
        self.plan = plan
        self.created = created
        self.matches: Matcher = any_matcher(plan.subjects)
        self.last_before_set = 0
        """The last sequence before the server's clock was set."""
        self.on_stored: dict[object, Callable[[StreamEntry], None]] = {}
        self.on_matching: SubjectIndex[Callable[[StreamEntry], None]] = SubjectIndex()
        self.size_bytes = 0
        self._entries: list[StreamEntry | None] = [None] * (plan.first_sequence - 1)
        self._by_subject: dict[str, list[int]] = {}
        self._sizes: dict[int, int] = {}
        self._ids: OrderedDict[str, tuple[int, int]] = OrderedDict()

    @property
    def last_sequence(self) -> int:
        return len(self._entries)

    @property
    def count(self) -> int:
        """Entries that it holds."""
        return len(self._sizes)

    def store(self, subject: str, payload: bytes, message_id: str, expected_last: int | None, now_ns: int) -> PublishAck:
        """Store one message; raises `SequenceConflict` or `LogFull`. Expectation first, then the id, then the room."""
        if expected_last is not None and expected_last != self.last_on(subject):
            raise SequenceConflict(subject, expected_last, self.last_on(subject))
        self._forget_ids(now_ns)
        known = self._ids.get(message_id)
        if known is not None:
            return PublishAck(sequence=known[0], duplicate=True)
        size = ENTRY_BYTES + len(subject) + len(payload) + len(message_id)
        if self.plan.max_bytes and self.size_bytes + size > self.plan.max_bytes:
            raise LogFull(f"{subject}: maximum bytes exceeded")
        entry = StreamEntry(subject=subject, payload=payload, sequence=self.last_sequence + 1, time_ns=now_ns)
        self._append(entry, size)
        self._ids[message_id] = (entry.sequence, now_ns)
        for hear in [*self.on_matching.find(subject), *self.on_stored.values()]:
            hear(entry)
        return PublishAck(sequence=entry.sequence)

    def get(self, sequence: int) -> StreamEntry | None:
        return self._entries[sequence - 1] if 0 < sequence <= len(self._entries) else None

    def last(self, subject: str) -> StreamEntry | None:
        return self.get(self.last_on(subject))

    def on_subject(self, subject: str) -> list[StreamEntry]:
        """All entries on a literal subject in order."""
        return [entry for sequence in self._by_subject.get(subject, ()) if (entry := self.get(sequence)) is not None]

    def list_subjects(self, matches: Matcher) -> list[str]:
        """Matching subjects that have entries."""
        return [subject for subject in self._by_subject if matches(subject)]

    def find_matches(self, matches: Matcher) -> Iterator[int]:
        """Sequences of all entries whose subject matches."""
        return (entry.sequence for entry in self._entries if entry is not None and matches(entry.subject))

    def next(self, matches: Matcher, start: int) -> StreamEntry | None:
        """The first matching entry from sequence ``start`` on."""
        following = (self._entries[index] for index in range(max(start, 1) - 1, len(self._entries)))
        return next((entry for entry in following if entry is not None and matches(entry.subject)), None)

    def find_end(self, time_ns: int) -> int:
        """The last sequence that was stored by then, as far as the newest entries say, and at least what was stored before the
        clock was set."""
        sequence = self.last_sequence
        while sequence > self.last_before_set and (entry := self.get(sequence)) is not None and entry.time_ns > time_ns:
            sequence -= 1
        return sequence

    def purge(self, below: int, matches: Matcher | None = None) -> None:
        """Remove all matching entries with a sequence below this one; consumers that have not seen them never will."""
        for sequence in range(1, min(below, len(self._entries) + 1)):
            entry = self._entries[sequence - 1]
            if entry is not None and (matches is None or matches(entry.subject)):
                self._entries[sequence - 1] = None
                self._by_subject[entry.subject].remove(sequence)
                if not self._by_subject[entry.subject]:
                    del self._by_subject[entry.subject]
                self.size_bytes -= self._sizes.pop(sequence)

    def copy_files(self) -> StreamFiles:
        """Everything that it has stored."""
        by_subject = {subject: list(sequences) for subject, sequences in self._by_subject.items()}
        return {
            "_entries": list(self._entries), "_by_subject": by_subject, "_sizes": dict(self._sizes),
            "_ids": self._ids.copy(), "size_bytes": self.size_bytes,
        }  # fmt: skip

    def put_back(self, files: StreamFiles) -> None:
        """Hold what it held when `copy_files` was called, and nothing that came after it."""
        vars(self).update(files)

    def last_on(self, subject: str) -> int:
        """The last sequence on a literal subject, 0 if there is none."""
        sequences = self._by_subject.get(subject)
        return sequences[-1] if sequences else 0

    def _append(self, entry: StreamEntry, size: int) -> None:
        self._entries.append(entry)
        self._sizes[entry.sequence] = size
        self.size_bytes += size
        sequences = self._by_subject.setdefault(entry.subject, [])
        sequences.append(entry.sequence)
        if self.plan.max_per_subject and len(sequences) > self.plan.max_per_subject:
            oldest = sequences.pop(0)
            self._entries[oldest - 1] = None
            self.size_bytes -= self._sizes.pop(oldest)

    def _forget_ids(self, now_ns: int) -> None:
        oldest_ns = now_ns - int(self.plan.duplicate_window_seconds * 1e9)
        while self._ids:
            message_id, (_, stored_ns) = next(iter(self._ids.items()))
            if stored_ns > oldest_ns:
                return
            del self._ids[message_id]
