"""Sessions that callers drive step by step, counted in an audit. Pure.

They are no episodes: nobody trains them here, so there is nothing that has to balance. What is counted is that they were there,
and how they ended. Memory grows with the sessions that are open.
"""

from __future__ import annotations

import msgspec

from fleetbus.core.audit.findings import SessionBooks
from fleetbus_schemas import SessionClaimed, SessionEnded, SessionRecorded


class SessionsAudit(msgspec.Struct):
    """Enter every entry of the sessions' journals in order, then ask for the counts."""

    _open: set[str] = set()
    _opened: int = 0
    _steps: int = 0
    _ended: dict[str, int] = {}

    def enter(self, name: str, message: SessionClaimed | SessionRecorded | SessionEnded) -> None:
        """One entry of the journal of the session with this ``name``; a claim that takes over opens nothing."""
        match message:
            case SessionClaimed():
                self._opened += name not in self._open and message.attempt == 1
                self._open.add(name)
            case SessionRecorded():
                self._steps += message.call.call == "step" and message.answer.end is None
                self._end(name, message.answer.end)
            case _:
                self._end(name, message.end)

    def _end(self, name: str, end: str | None) -> None:
        if end is not None and name in self._open:
            self._open.remove(name)
            self._ended[end] = self._ended.get(end, 0) + 1

    def count(self) -> SessionBooks:
        """The counts as of the last entry."""
        ended = dict(sorted(self._ended.items()))
        return SessionBooks(opened=self._opened, open=len(self._open), steps=self._steps, ended=ended)
