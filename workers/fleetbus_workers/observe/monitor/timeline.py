"""The use of one episode's time: the innermost spans of its trace, in seconds since its request, without gaps. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import msgspec

from fleetbus.bus.base import StreamEntry
from fleetbus_workers.observe.tracing.fold import LogTraces

Kind = Literal["waiting", "open", "queue", "generate", "travel", "environment", "verify", "lost"]
"""``waiting`` for a worker, ``open`` the environment, ``queue`` at the engine, ``generate``, ``travel`` to and from it,
``environment`` (tools and steps), ``verify`` and close, ``lost`` with a worker that went away."""

KINDS: dict[str, Kind] = {"open": "open", "generate": "generate", "lost": "lost", "verify": "verify", "close": "verify"}
KINDS |= {"tool": "environment", "step": "environment"}
"""By the name of the trace's span; a ``queue`` is for a worker or for an engine."""


class Span(msgspec.Struct, frozen=True, kw_only=True):
    """``[start, end)`` in seconds since the request."""

    kind: Kind
    start: float
    end: float
    attempt: int = 0
    turn: int = -1
    worker: str = ""


def timeline(entries: Iterable[StreamEntry]) -> list[Span]:
    """The spans of one episode from its entries in log order; empty without its request."""
    traces, zero_ns = LogTraces(""), 0
    spans: list[Span] = []

    def append(kind: Kind, end: float, attempt: int, turn: int, worker: str) -> None:
        start = spans[-1].end if spans else 0.0
        if spans and kind == spans[-1].kind == "verify":
            start = spans.pop().start
        if end > start:
            spans.append(Span(kind=kind, start=start, end=end, attempt=attempt, turn=turn, worker=worker))

    for entry in entries:
        for span in traces.add(entry):
            about = span.attributes
            kind = KINDS.get(span.name)
            if span.name == "queue":
                kind = "queue" if about.get("fleetbus.queue") == "inference" else "waiting"
            if kind is None:
                continue
            attempt, turn = int(str(about.get("fleetbus.attempt", 0))), int(str(about.get("fleetbus.turn", -1)))
            begin = (span.start_ns - zero_ns) / 1e9
            if spans and begin > spans[-1].end:
                append("travel" if spans[-1].kind == "generate" else "environment", begin, attempt, turn, span.worker)
            append(kind, (span.end_ns - zero_ns) / 1e9, attempt, turn, span.worker)
        if traces.open and not zero_ns:
            zero_ns = entry.time_ns
        if spans and spans[-1].kind == "generate" and entry.subject.split(".", 3)[2] == "act":
            last = spans[-1]
            append("travel", (entry.time_ns - zero_ns) / 1e9, last.attempt, last.turn, last.worker)
    return spans
