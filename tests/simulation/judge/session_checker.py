"""Books of all step-wise sessions: the journal from the log, and what clients were told, compared with it.

A session is one line of calls whoever holds it; what an environment shows depends on all calls before, so a call that was lost,
repeated or done upon another world shows in the next answer. Every end but a caller's own needs a cause.
"""

from __future__ import annotations

import msgspec

from fleetbus.bus.base import StreamEntry
from fleetbus_schemas import SessionAnswer, SessionClaimed, SessionEnded, SessionRecorded
from fleetbus_schemas.channels import STORED
from fleetbus_schemas.message import decode_any
from tests.simulation.doubles.environments import EnvironmentRecord, render_observation
from tests.simulation.observer import Observer

GIVEN_UP_CAUSES = frozenset({"closed", "idle", "total", "orphaned"})
"""Ends without a failure: a client called, or nobody did."""


class SessionPages(msgspec.Struct, kw_only=True):
    """One session as the log has it. ``was_removed``: one of its name ended and may have left the log; nobody may act upon a
    claim that comes after it."""

    was_removed: bool = False
    last: int = 0
    claims: list[SessionClaimed] = msgspec.field(default_factory=list)
    records: list[SessionRecorded] = msgspec.field(default_factory=list)
    end: str = ""


class SessionChecker:
    """Pages by session. ``environments`` are all that were made for one, by session."""

    def __init__(self, observer: Observer, *, replayable: bool) -> None:
        self._observer = observer
        self._replayable = replayable
        self.pages: dict[str, SessionPages] = {}
        self.environments: dict[str, list[EnvironmentRecord]] = {}
        self.answered = 0
        self._floor = 0

    def raise_floor(self, sequence: int) -> None:
        """Sessions that ended below it may have left the log."""
        self._floor = max(self._floor, sequence)

    def is_refused(self, session: str) -> bool:
        """True if it was claimed by a call that was on its way for longer than settled entries stay: nothing came of it."""
        pages = self.pages.get(session)
        return pages is not None and not pages.records and self._floor > 0

    def has_left(self, session: str) -> bool:
        """True if it ended so long ago that its journal may have left the log."""
        pages = self.pages.get(session)
        return pages is not None and bool(pages.end) and pages.last < self._floor

    def register_environment(self, record: EnvironmentRecord) -> None:
        self.environments.setdefault(record.episode, []).append(record)

    def on_session(self, entry: StreamEntry) -> None:
        """An entry of ``session.<session>``."""
        message = decode_any(STORED["session"], entry.payload, subject=entry.subject)
        assert isinstance(message, (SessionClaimed, SessionRecorded, SessionEnded))
        pages = self.pages.setdefault(message.session, SessionPages())
        if pages.end and pages.last < self._floor and isinstance(message, SessionClaimed):
            pages = self.pages[message.session] = SessionPages(was_removed=True)
        pages.last = entry.sequence
        require, name = self._observer.require, f"{message.session}: {type(message).__name__}"
        require(not pages.end, "nothing follows the end of a session", f"{name} after {pages.end}")
        if isinstance(message, SessionClaimed):
            require(message.attempt == len(pages.claims) + 1, "sessions' claims are numbered without gaps", name)
            pages.claims.append(message)
        elif not pages.claims:
            self._observer.violate("a session begins with a claim", name)
        elif isinstance(message, SessionRecorded):
            self._apply_record(pages, message)
        else:
            self._apply_end(pages, message.session, message.end, message.error_class)

    def on_answer(self, answer: SessionAnswer) -> None:
        """A client was given this answer: the log has the same by then."""
        self.answered += 1
        if answer.refusal or answer.key == "close":
            return
        pages = self.pages.get(answer.session, SessionPages())
        stored = [record.answer for record in pages.records if record.answer.key == answer.key]
        right = stored == [answer]
        self._observer.require(right, "an answer is recorded before it is given", f"{answer.session} call {answer.key}")

    def check_environments(self) -> None:
        """Whatever was opened for a session was closed, once, unless its process was killed."""
        for session, records in self.environments.items():
            for record in records:
                if record.process.ending != "crashed":
                    name = f"{session} on {record.process.name}: closed {record.closes} times"
                    self._observer.require(record.closes == 1, "a session's environment is closed exactly once", name)

    def _apply_record(self, pages: SessionPages, recorded: SessionRecorded) -> None:
        require, answer = self._observer.require, recorded.answer
        name = f"{recorded.session} call {answer.number} {recorded.call.call} by {answer.worker}"
        require(not pages.was_removed, "what the floor refuses is not played", name)
        require(answer.number == len(pages.records), "a session's calls are numbered without gaps", name)
        require(answer.worker == pages.claims[-1].worker, "only the newest claim's worker answers", name)
        known = {record.call.key for record in pages.records}
        require(recorded.call.key not in known, "a call of a session is executed once", name)
        pages.records.append(recorded)
        if answer.end is not None:
            self._apply_end(pages, recorded.session, answer.end, answer.error_class)
        elif recorded.call.call in ("reset", "step") and self._is_predictable(pages):
            shown = "".join(str(message.content) for message in answer.messages)
            expected = "" if answer.terminated else self._render(pages)
            require(shown == expected, "a step of a session follows all steps before", f"{name}: {shown}, not {expected}")

    def _apply_end(self, pages: SessionPages, session: str, end: str, error_class: str) -> None:
        pages.end = end
        name = f"{session}: {end} {error_class}"
        environments = self._find_environments(pages)
        failed = any(record.fault_profile for record in environments)
        moved = len(pages.claims) > 1 or any(record.process.drain.is_set() for record in environments)
        has_cause = {
            "env_failed": failed,
            "timeout": failed,
            "lost": moved and (not self._replayable or not self._is_predictable(pages)),
        }
        self._observer.require(has_cause.get(end, end in GIVEN_UP_CAUSES), "every end of a session has a cause", name)

    def _is_predictable(self, pages: SessionPages) -> bool:
        return self._replayable and not any(record.diverges for record in self._find_environments(pages))

    def _find_environments(self, pages: SessionPages) -> list[EnvironmentRecord]:
        """Those of its task: a gateway that begins anew gives the session another name, and the same task."""
        return self.environments.get(pages.claims[0].task.key, []) if pages.claims else []

    def _render(self, pages: SessionPages) -> str:
        """What a replayable environment shows after the calls so far."""
        texts: list[bytes] = []
        for record in pages.records:
            if record.call.call == "reset":
                texts = []
            elif record.call.call == "step":
                texts.append(record.call.text.encode())
        return render_observation(pages.claims[0].task.key, texts)
