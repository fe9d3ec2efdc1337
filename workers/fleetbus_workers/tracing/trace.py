"""What the traces of an episode and of a session have in common: spans of one trace, by paths that never change. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from fleetbus.core.trace_ids import span_id
from fleetbus_workers.tracing.span import Span, Value


class Trace:
    """``common`` are the attributes of every span. ``_sequence`` is the entry that is being taken in."""

    def __init__(self, trace_id: int, sequence: int, common: dict[str, Value]) -> None:
        self.trace_id = trace_id
        self._sequence = sequence
        self._common = common

    def _span(
        self,
        name: str,
        path: str,
        parent: str,
        start_ns: int,
        end_ns: int,
        *,
        role: str = "environment",
        worker: str = "",
        error: str = "",
        about: Mapping[str, Value] = {},
        links: tuple[tuple[int, int], ...] = (),
    ) -> Span:
        own: dict[str, Value] = {**self._common, "fleetbus.worker": worker} if worker else self._common
        return Span(
            trace_id=self.trace_id,
            span_id=span_id(self.trace_id, path),
            parent_id=span_id(self.trace_id, parent) if parent else 0,
            name=name,
            start_ns=min(start_ns, end_ns),
            end_ns=end_ns,
            sequence=self._sequence,
            role=role,
            worker=worker,
            attributes={**own, **about},
            error=error,
            links=links,
        )
