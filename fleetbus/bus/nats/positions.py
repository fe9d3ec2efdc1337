"""Highest log positions known to one connection, by subject: those that were acknowledged, and those that a refusal named.

On a replicated log any replica answers a direct get, and one that lags does not know yet what was acked a moment ago. Whoever
has the ack, or the refusal, can tell. Above it are the bus and its publisher; below it is nothing.
"""

from collections import OrderedDict
from collections.abc import Iterable

from fleetbus.bus.base import StreamEntry

REMEMBERED = 4096
"""Most subjects remembered; the least recently updated one is dropped first."""


class Positions:
    """The highest known position of each subject."""

    def __init__(self) -> None:
        self._known: OrderedDict[str, int] = OrderedDict()

    def note(self, subject: str, sequence: int) -> None:
        """An entry at this position stands on the subject."""
        self._known[subject] = max(sequence, self._known.pop(subject, 0))
        if len(self._known) > REMEMBERED:
            self._known.popitem(last=False)

    def is_behind(self, subjects: Iterable[str], found: Iterable[StreamEntry]) -> bool:
        """True if entries were read of these literal subjects that end before what is known to stand there."""
        expected = {subject: self._known[subject] for subject in subjects if subject in self._known}
        if not expected:
            return False
        last = {entry.subject: entry.sequence for entry in found}
        return any(last.get(subject, 0) < sequence for subject, sequence in expected.items())
