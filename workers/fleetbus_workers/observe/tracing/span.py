"""A span before it is OpenTelemetry's: what the fold makes, by paths that never change, and the sinks write."""

from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec

from fleetbus.core.episode.trace_ids import span_id
from fleetbus.package_version import read_fleetbus_version

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


MAX_SECONDS = 1e9
"""30 years: what claims to have taken longer was not measured."""


def to_nanoseconds(seconds: float) -> int:
    """A duration that a worker measured, 0 for what cannot be one."""
    return int(seconds * 1e9) if 0 < seconds < MAX_SECONDS else 0


class SpanSink(Protocol):
    """Blocking; called from one thread at a time."""

    def write(self, spans: Sequence[Span]) -> None:
        """Have them all; raises `fleetbus_workers.observe.tracing.span.SpansRefused`."""

    def close(self) -> None: ...


class SpansRefused(Exception):
    """Spans were refused; the message names the receiver and the reason."""


class Trace:
    """Spans of one trace. ``common`` are the attributes of every span; ``_sequence`` is the entry that is being taken in."""

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


SCOPE = "fleetbus"


def build_resource_attributes(run: str, role: str, worker: str) -> dict[str, str]:
    """The attributes of a worker's OpenTelemetry resource: a role is a service, a worker one instance of it."""
    named = {"service.instance.id": worker} if worker else {}
    about = {"service.name": f"fleetbus-{role}", "service.namespace": "fleetbus", "service.version": read_fleetbus_version()}
    return about | named | {"fleetbus.run": run}
