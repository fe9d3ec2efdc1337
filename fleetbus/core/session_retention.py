"""Which journals of step-wise sessions are no longer needed: those that ended a while ago. Pure."""

from __future__ import annotations

import msgspec


class _Journal(msgspec.Struct):
    first: int
    last: int
    is_over: bool


class SessionRetention:
    """Enter every entry of a journal in order; memory grows with the journals in the log."""

    def __init__(self) -> None:
        self._journals: dict[str, _Journal] = {}

    def __len__(self) -> int:
        return len(self._journals)

    def enter(self, sequence: int, session: str, *, is_over: bool) -> None:
        """``is_over``: the entry is the journal's last."""
        journal = self._journals.setdefault(session, _Journal(sequence, sequence, False))
        journal.last = sequence
        journal.is_over = journal.is_over or is_over

    def list_over(self, last_sequence: int) -> dict[str, int]:
        """By session the last entry of every journal that ended by ``last_sequence``."""
        return {
            session: journal.last
            for session, journal in self._journals.items()
            if journal.is_over and journal.last <= last_sequence
        }

    def compute_prefix(self, last_sequence: int) -> int:
        """Below this sequence, at most one after ``last_sequence``, all journals ended by ``last_sequence``."""
        needed = (
            journal.first for journal in self._journals.values() if not (journal.is_over and journal.last <= last_sequence)
        )
        return min(min(needed, default=last_sequence + 1), last_sequence + 1)

    def forget(self, session: str) -> None:
        """The journal has left the log."""
        del self._journals[session]
