"""Step-wise sessions as traces: a span per call that was executed, whoever executed it, and nothing twice."""

from __future__ import annotations

import msgspec
import pytest

from fleetbus.bus.base import StreamEntry
from fleetbus.core.episode.trace_ids import build_call_path, compute_session_trace_id, format_traceparent, span_id, trace_id
from fleetbus_schemas import (
    ChatMessage,
    Message,
    SessionAnswer,
    SessionCall,
    SessionClaimed,
    SessionEnded,
    SessionRecorded,
    Subjects,
    Task,
    ToolCall,
    encode,
)
from fleetbus_schemas.session import SessionCallKind, SessionEnd
from fleetbus_workers.observe.tracing.fold import LogTraces
from fleetbus_workers.observe.tracing.otlp_file import request as otlp_request
from fleetbus_workers.observe.tracing.span import Span

SUBJECTS = Subjects("r")
SECOND = 1_000_000_000


class Journal:
    """Entries of one session at given seconds, and the spans that they ended."""

    def __init__(self, traces: LogTraces | None = None, session: str = "s") -> None:
        self.entries: list[StreamEntry] = []
        self.traces = traces or LogTraces("r")
        self.spans: list[Span] = []
        self._session = session
        self._number = 0

    def add(self, message: Message, seconds: float) -> None:
        self.put(encode(message), seconds)

    def put(self, payload: bytes, seconds: float) -> None:
        sequence = len(self.entries) + 1
        subject = SUBJECTS.session(self._session)
        entry = StreamEntry(subject=subject, payload=payload, sequence=sequence, time_ns=int(seconds * SECOND))
        self.entries.append(entry)
        self.spans += self.traces.add(entry)

    def claim(self, seconds: float, attempt: int = 1) -> None:
        task = Task(key="t", env="count", prompt="a secret")
        self.add(SessionClaimed(session=self._session, attempt=attempt, worker=f"env-{attempt}", nonce="n", task=task), seconds)

    def call(self, seconds: float, kind: SessionCallKind, took: float = 0.5, *, attempt: int = 1, **answer: object) -> None:
        call = SessionCall(
            session=self._session, call=kind, key=f"k{self._number}", seed=7 if kind == "reset" else None, text="a secret",
            tool_calls=(ToolCall(name="search"),) if kind == "step" else (),
        )  # fmt: skip
        made = SessionAnswer(
            session=self._session, key=call.key, number=self._number, worker=f"env-{attempt}",
            messages=(ChatMessage(role="user", content="a secret"),), **answer,  # type: ignore[arg-type]
        )  # fmt: skip
        self._number += 1
        self.add(SessionRecorded(session=self._session, call=call, answer=made, seconds=took), seconds)

    def end(self, seconds: float, end: SessionEnd = "closed", worker: str = "env-1") -> None:
        self.add(SessionEnded(session=self._session, end=end, worker=worker), seconds)

    def list_spans(self) -> list[tuple[str, str, float, float]]:
        """Parent's name, name, start and end in seconds."""
        names = {span.span_id: span.name for span in self.spans}
        return [(names.get(span.parent_id, ""), span.name, span.start_ns / SECOND, span.end_ns / SECOND) for span in self.spans]

    def named(self, name: str) -> list[Span]:
        return [span for span in self.spans if span.name == name]


def build_one_session() -> Journal:
    journal = Journal()
    journal.claim(1.0)
    journal.call(2.0, "open")
    journal.call(3.0, "reset")
    journal.call(6.0, "step", 2.0, reward=0.25, tool_calls=2, tool_errors=1)
    journal.call(7.0, "step", reward=0.0, terminated=True)
    journal.call(8.0, "verify", reward=1.0)
    journal.end(9.0)
    return journal


def test_a_session_is_one_trace_with_a_span_for_every_call() -> None:
    journal = build_one_session()
    assert journal.list_spans() == [
        ("attempt", "open", 1.5, 2.0),
        ("attempt", "reset", 2.5, 3.0),
        ("attempt", "step", 4.0, 6.0),
        ("attempt", "step", 6.5, 7.0),
        ("attempt", "verify", 7.5, 8.0),
        ("session", "attempt", 1.0, 9.0),
        ("", "session", 1.0, 9.0),
    ]
    assert {span.trace_id for span in journal.spans} == {compute_session_trace_id("r", "s")}
    assert {span.role for span in journal.spans} == {"environment"} and not any(span.error for span in journal.spans)
    assert (journal.traces.sessions, journal.traces.open_sessions) == (1, 0)


def test_spans_say_where_their_messages_stand_and_what_came_of_them() -> None:
    journal = build_one_session()
    first, second = journal.named("step")
    said = {name: first.attributes[f"fleetbus.{name}"] for name in ("session", "attempt", "turn", "reset", "reward", "worker")}
    assert said == {"session": "s", "attempt": 1, "turn": 0, "reset": 1, "reward": 0.25, "worker": "env-1"}
    assert first.attributes["fleetbus.call.key"] == "k2" and first.attributes["fleetbus.call.number"] == 2
    assert first.attributes["fleetbus.journal.sequence"] == 4 and first.attributes["gen_ai.tool.name"] == "search"
    assert second.attributes["fleetbus.turn"] == 1 and second.attributes["fleetbus.terminated"] is True
    assert journal.named("reset")[0].attributes["fleetbus.seed"] == 7
    root = journal.named("session")[0].attributes
    assert (root["fleetbus.claim.sequence"], root["fleetbus.end.sequence"], root["fleetbus.session.end"]) == (1, 7, "closed")
    assert (root["fleetbus.calls.step"], root["fleetbus.tool_errors"], root["fleetbus.reward"]) == (2, 1, 1.0)
    assert (root["fleetbus.task"], root["fleetbus.environment"]) == ("t", "count")


def test_whoever_has_a_call_of_the_session_names_the_same_trace_and_span() -> None:
    step = build_one_session().named("step")[0]
    trace = compute_session_trace_id("r", "s")
    assert (step.trace_id, step.span_id) == (trace, span_id(trace, build_call_path("k2")))
    assert format_traceparent(trace, build_call_path("k2")) == f"00-{trace:032x}-{step.span_id:016x}-01"
    assert len({trace, compute_session_trace_id("r2", "s"), compute_session_trace_id("r", "t"), trace_id("r", "s", 0)}) == 4


def test_a_second_reset_begins_to_count_turns_again() -> None:
    journal = Journal()
    journal.claim(1.0)
    for seconds, kind in enumerate(("open", "reset", "step", "reset", "step", "step"), 2):
        journal.call(seconds, kind)  # type: ignore[arg-type]
    turns = [(span.attributes["fleetbus.reset"], span.attributes["fleetbus.turn"]) for span in journal.named("step")]
    assert turns == [(1, 0), (2, 0), (2, 1)]


def test_a_session_that_another_worker_took_over_has_two_attempts_and_says_how_long_it_took_to_be_restored() -> None:
    journal = Journal()
    journal.claim(1.0)
    journal.call(2.0, "open")
    journal.call(3.0, "reset")
    journal.claim(20.0, attempt=2)
    journal.call(25.0, "step", 1.0, attempt=2)
    journal.end(30.0, worker="env-2")
    assert journal.list_spans()[2:] == [
        ("session", "attempt", 1.0, 3.0),
        ("attempt", "restore", 20.0, 24.0),
        ("attempt", "step", 24.0, 25.0),
        ("session", "attempt", 20.0, 30.0),
        ("", "session", 1.0, 30.0),
    ]
    first, second = journal.named("attempt")
    assert (first.worker, first.attributes["fleetbus.attempt.end"]) == ("env-1", "moved") and not first.error
    assert (second.worker, second.attributes["fleetbus.attempt.end"]) == ("env-2", "closed")
    assert journal.named("session")[0].attributes["fleetbus.attempts"] == 2


@pytest.mark.parametrize("end", ["idle", "total", "lost", "orphaned", "env_failed", "timeout"])
def test_a_session_that_nobody_closed_is_a_failed_trace_that_says_why(end: SessionEnd) -> None:
    journal = Journal()
    journal.claim(1.0)
    journal.call(2.0, "open")
    journal.end(5000.0, end, worker="env-9")
    session, attempt = journal.named("session")[0], journal.named("attempt")[0]
    assert session.error == end and attempt.error == end
    assert attempt.end_ns == (2 if end == "orphaned" else 5000) * SECOND, "an orphan was left long before it was found"


def test_a_call_that_ends_its_session_is_what_failed() -> None:
    journal = Journal()
    journal.claim(1.0)
    journal.call(2.0, "open")
    journal.call(3.0, "reset", end="env_failed", error_class="ValueError", error="no")
    reset, session = journal.named("reset")[0], journal.named("session")[0]
    assert reset.error == "ValueError: no" and session.error == "env_failed: ValueError no"
    assert journal.traces.open_sessions == 0
    before = len(journal.spans)
    journal.call(4.0, "step")
    journal.claim(5.0, attempt=2)
    journal.end(6.0)
    assert len(journal.spans) == before, "what follows the end changes nothing"


def test_measured_times_never_make_a_span_begin_before_its_attempt_or_the_call_before_it() -> None:
    journal = Journal()
    journal.claim(1.0)
    journal.call(1.5, "open", 100.0)
    journal.call(2.0, "reset", -3.0)
    journal.call(2.5, "step", 100.0)
    assert journal.list_spans() == [("", "open", 1.0, 1.5), ("", "reset", 2.0, 2.0), ("", "step", 2.0, 2.5)]


def test_an_entry_that_is_no_message_and_a_journal_without_a_beginning_are_passed_over() -> None:
    journal = Journal()
    journal.call(0.5, "step")
    journal.claim(0.6, attempt=3)
    journal.claim(1.0)
    journal.put(b"\xff", 1.5)
    journal.call(2.0, "open")
    journal.end(3.0)
    assert [span.name for span in journal.spans] == ["open", "attempt", "session"]


def test_only_the_wanted_sessions_have_traces_and_a_share_is_kept_by_trace() -> None:
    entries = build_one_session().entries

    def count(**chosen: object) -> int:
        traces = LogTraces("r", **chosen)  # type: ignore[arg-type]
        return len([span for entry in entries for span in traces.add(entry)])

    assert (count(), count(sessions=["s"]), count(sessions=["x"]), count(episodes=["s"])) == (7, 7, 0, 0)
    assert (count(ratio=0.0), count(ratio=1.0)) == (0, 7)


def test_what_was_said_in_a_session_is_in_no_trace() -> None:
    assert b"a secret" not in msgspec.json.encode(otlp_request(build_one_session().spans, "r"))


def test_a_session_is_a_conversation_whose_texts_are_there_by_choice() -> None:
    silent, telling = build_one_session(), Journal(LogTraces("r", content=True))
    for entry in silent.entries:
        telling.spans += telling.traces.add(entry)
    said = [{name: span.attributes[name] for name in span.attributes if name.startswith("gen_ai.")} for span in telling.spans]
    agent = {"gen_ai.conversation.id": "s", "gen_ai.agent.name": "count"}
    called = {"gen_ai.tool.name": "search", "gen_ai.tool.call.arguments": "{}", "gen_ai.tool.call.result": "a secret"}
    step = {"gen_ai.operation.name": "execute_tool", **agent, **called}
    session = {"gen_ai.operation.name": "invoke_agent", **agent, "gen_ai.provider.name": "fleetbus"}
    assert said == [{}, {}, step, step, {}, {}, session]
    assert not [span for span in silent.spans if "a secret" in map(str, span.attributes.values())]
