"""One step-wise session as spans: a fold of its journal in the order of the log. Pure.

    session                      first claim to its end
    └─ attempt                   claim to the end, or to the last sign before another worker's claim
       ├─ restore                only after another worker had it: what was done is done again
       └─ open, reset, step, state, verify   one per call that was executed, however often it was made

Between two calls the session waits for its client, of which the log knows nothing. Calls that were refused, or answered from
the journal, are not in it. A call ends when its entry was stored; how long it took is what the worker measured.
"""

from collections import Counter
from collections.abc import Iterator

from fleetbus.bus.base import StreamEntry
from fleetbus.core.episode.trace_ids import ROOT, build_call_path, compute_session_trace_id
from fleetbus_schemas import SessionClaimed, SessionEnded, SessionRecorded
from fleetbus_workers.observe.tracing import gen_ai
from fleetbus_workers.observe.tracing.span import Span, Trace, Value, to_nanoseconds


class SessionTrace(Trace):
    """One session from its first claim on. ``is_over`` once it has ended: what follows changes nothing. Spans have what was
    said only with ``content``."""

    def __init__(self, run: str, entry: StreamEntry, claim: SessionClaimed, *, content: bool = False) -> None:
        common: dict[str, Value] = {"fleetbus.run": run, "fleetbus.session": claim.session}
        super().__init__(compute_session_trace_id(run, claim.session), entry.sequence, common)
        self.is_over = False
        self._task: dict[str, Value] = {"fleetbus.task": claim.task.key, "fleetbus.environment": claim.task.env}
        self._with_content = content
        self._name, self._agent = claim.session, claim.task.env
        self._claim = claim
        self._claim_sequence = self._first_claim_sequence = entry.sequence
        self._begun_ns = self._claimed_ns = self._seen_ns = entry.time_ns
        self._is_restored = True
        self._calls: Counter[str] = Counter()
        self._turn = 0
        self._tool_calls = self._tool_errors = 0
        self._verdict: dict[str, Value] = {}

    def apply_claim(self, entry: StreamEntry, claim: SessionClaimed) -> Iterator[Span]:
        """Another worker takes over: the previous one was killed, cut off, or released it; the log does not say which."""
        self._sequence = entry.sequence
        yield from self._end_attempt(self._seen_ns, "moved")
        self._claim, self._claim_sequence = claim, entry.sequence
        self._claimed_ns = self._seen_ns = entry.time_ns
        self._is_restored = False

    def apply_record(self, entry: StreamEntry, record: SessionRecorded) -> Iterator[Span]:
        """A call was executed; the answer may end the session."""
        self._sequence = entry.sequence
        call, answer = record.call, record.answer
        begins = max(entry.time_ns - to_nanoseconds(record.seconds), self._seen_ns)
        yield from self._build_restore_span(begins)
        self._seen_ns = entry.time_ns
        self._count_record(record)
        worker = answer.worker or self._claim.worker
        error = f"{answer.error_class}: {answer.error}" if answer.end else ""
        path = build_call_path(call.key)
        about = self._build_attributes(record) | {"fleetbus.journal.sequence": entry.sequence}
        yield self._span(call.call, path, self._attempt_path, begins, entry.time_ns, worker=worker, error=error, about=about)
        if answer.end:
            yield from self._finish(entry, answer.end, answer.error_class, answer.error, worker)

    def apply_end(self, entry: StreamEntry, end: SessionEnded) -> Iterator[Span]:
        """The tombstone: closed by its client, by a limit, or as an orphan."""
        self._sequence = entry.sequence
        yield from self._build_restore_span(self._seen_ns if end.end == "orphaned" else entry.time_ns)
        yield from self._finish(entry, end.end, end.error_class, end.error, end.worker or self._claim.worker)

    # Building the trace

    def _count_record(self, record: SessionRecorded) -> None:
        kind, answer = record.call.call, record.answer
        self._calls[kind] += 1
        if kind == "reset":
            self._turn = 0
        elif kind == "step":
            self._turn += 1
            self._tool_calls += answer.tool_calls
            self._tool_errors += answer.tool_errors
        elif kind == "verify":
            self._verdict = {} if answer.reward is None else {"fleetbus.reward": answer.reward}

    def _build_attributes(self, record: SessionRecorded) -> dict[str, Value]:
        call, answer = record.call, record.answer
        about: dict[str, Value] = {"fleetbus.attempt": self._claim.attempt, "fleetbus.call.key": call.key}
        about["fleetbus.call.number"] = answer.number
        if self._calls["reset"]:
            about["fleetbus.reset"] = self._calls["reset"]
        if call.call == "reset" and call.seed is not None:
            about["fleetbus.seed"] = call.seed
        if call.call == "step":
            about |= {"fleetbus.turn": self._turn - 1, "fleetbus.terminated": answer.terminated}
            about |= {"fleetbus.truncated": answer.truncated, "fleetbus.tool_calls": answer.tool_calls}
            about |= {"fleetbus.tool_errors": answer.tool_errors}
            if call.tool_calls:
                about |= gen_ai.describe_agent("execute_tool", self._name, self._agent) | gen_ai.describe_calls(call.tool_calls)
                about |= gen_ai.describe_call_content(call.tool_calls, answer.messages) if self._with_content else {}
        if call.call in ("step", "verify") and answer.reward is not None:
            about["fleetbus.reward"] = answer.reward
        return about

    def _build_restore_span(self, end_ns: int) -> Iterator[Span]:
        """A session is taken over for a call that waits, so what passes until that begins is spent on doing it again."""
        if not self._is_restored:
            self._is_restored = True
            path = f"{self._attempt_path}/restore"
            worker = self._claim.worker
            yield self._span("restore", path, self._attempt_path, self._claimed_ns, end_ns, worker=worker)

    def _finish(self, entry: StreamEntry, end: str, error_class: str, error: str, worker: str) -> Iterator[Span]:
        self.is_over = True
        failed = "" if end == "closed" else f"{end}: {error_class} {error}".strip().rstrip(":")
        last_ns = self._seen_ns if end == "orphaned" else entry.time_ns  # somebody else found it, long after
        yield from self._end_attempt(last_ns, end, error=failed)
        about = self._task | gen_ai.describe_agent("invoke_agent", self._name, self._agent)
        about |= {gen_ai.PROVIDER: gen_ai.PROVIDED, "fleetbus.session.end": end, "fleetbus.attempts": self._claim.attempt}
        about |= {f"fleetbus.calls.{kind}": count for kind, count in self._calls.items()}
        about |= {"fleetbus.tool_calls": self._tool_calls, "fleetbus.tool_errors": self._tool_errors} | self._verdict
        about |= {"fleetbus.claim.sequence": self._first_claim_sequence, "fleetbus.end.sequence": entry.sequence}
        yield self._span("session", ROOT, "", self._begun_ns, entry.time_ns, worker=worker, error=failed, about=about)

    def _end_attempt(self, end_ns: int, how: str, *, error: str = "") -> Iterator[Span]:
        claim = self._claim
        about: dict[str, Value] = {"fleetbus.attempt": claim.attempt, "fleetbus.attempt.end": how}
        about["fleetbus.claim.sequence"] = self._claim_sequence
        if how == "moved":
            yield from self._build_restore_span(end_ns)
        yield self._span(
            "attempt", self._attempt_path, ROOT, self._claimed_ns, end_ns, worker=claim.worker, error=error, about=about
        )

    @property
    def _attempt_path(self) -> str:
        return f"attempt/{self._claim.attempt}"
