"""A span before it is OpenTelemetry's: what the fold makes and the sinks write."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec

Value = str | int | float | bool | tuple[str, ...] | tuple[int, ...]


class Span(msgspec.Struct, frozen=True, kw_only=True):
    """``[start_ns, end_ns]`` in server time; ``parent_id`` 0 for none. ``role`` and ``worker`` did it.

    ``sequence`` is the entry of the log that ended it: with all entries up to some sequence exactly the spans up to that
    sequence are known. ``error`` is empty unless it failed; ``links`` are pairs of trace and span id.
    """

    trace_id: int
    span_id: int
    name: str
    start_ns: int
    end_ns: int
    sequence: int
    role: str
    worker: str = ""
    parent_id: int = 0
    attributes: Mapping[str, Value] = {}
    error: str = ""
    links: tuple[tuple[int, int], ...] = ()


class SpanSink(Protocol):
    """Blocking; called from one thread at a time."""

    def write(self, spans: Sequence[Span]) -> None:
        """Have them all; raises `fleetbus_workers.tracing.span.SpansRefused`."""

    def close(self) -> None: ...


class SpansRefused(Exception):
    """Spans were refused; the message names the receiver and the reason."""
