"""Spans as lines of OTLP's own JSON, which the OpenTelemetry Collector reads (``otlpjsonfile``). Needs no package.

One line is one `ExportTraceServiceRequest`; ids are hexadecimal and 64-bit integers are texts, as the protocol's JSON wants it
(opentelemetry.io/docs/specs/otel/protocol/file-exporter).
"""

import math
import os
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from fleetbus.errors import UserError
from fleetbus_workers.observe.tracing.span import SCOPE, Span, SpansRefused, Value, build_resource_attributes

INTERNAL = 1
ERROR = 2
MAX_INTEGER = (1 << 63) - 1
_NOT_FINITE = {math.inf: "Infinity", -math.inf: "-Infinity"}
"""As the JSON of Protocol Buffers spells them; a reader refuses the whole line for a null."""


class FileSink:
    """Appends; what a kill or a full disk left of a line gets an end, so that it spoils no other. Closing it waits for a write
    under way, as a cancelled export leaves its thread writing; nothing is written after."""

    def __init__(self, path: Path, *, run: str) -> None:
        self._run = run
        self._path = path
        self._lock = threading.Lock()
        try:
            self._file = path.open("ab", buffering=0)  # a buffer writes what was refused beside its repetition
        except OSError as error:
            raise UserError(f"{path} cannot be written: {error.strerror}") from error

    def write(self, spans: Sequence[Span]) -> None:
        line = msgspec.json.encode(request(spans, self._run)) + b"\n"
        with self._lock:
            if self._file.closed:
                raise SpansRefused(f"{self._path} is closed")
            try:
                left = memoryview(b"\n" + line if _is_torn(self._path) else line)
                while left:
                    if not (written := self._file.write(left)):
                        raise SpansRefused(f"{self._path} takes nothing now")
                    left = left[written:]
            except OSError as error:
                raise SpansRefused(f"{self._path} cannot be written: {error.strerror}") from error

    def close(self) -> None:
        with self._lock:
            self._file.close()


def _is_torn(path: Path) -> bool:
    """True for a file whose last line has no end."""
    if not path.is_file() or not path.stat().st_size:
        return False
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read() != b"\n"


def request(spans: Sequence[Span], run: str) -> dict[str, Any]:
    """The spans by worker, as an `ExportTraceServiceRequest` in JSON."""
    by_worker: dict[tuple[str, str], list[Span]] = {}
    for span in spans:
        by_worker.setdefault((span.role, span.worker), []).append(span)
    return {
        "resourceSpans": [
            {
                "resource": {"attributes": _encode_attributes(build_resource_attributes(run, role, worker))},
                "scopeSpans": [{"scope": {"name": SCOPE}, "spans": [_encode_span(span) for span in each]}],
            }
            for (role, worker), each in by_worker.items()
        ]
    }


def _encode_span(span: Span) -> dict[str, object]:
    encoded: dict[str, object] = {
        "traceId": f"{span.trace_id:032x}",
        "spanId": f"{span.span_id:016x}",
        "name": span.name,
        "kind": INTERNAL,
        "startTimeUnixNano": str(span.start_ns),
        "endTimeUnixNano": str(span.end_ns),
        "attributes": _encode_attributes(span.attributes),
    }
    if span.parent_id:
        encoded["parentSpanId"] = f"{span.parent_id:016x}"
    if span.error:
        encoded["status"] = {"code": ERROR, "message": span.error}
    if span.links:
        encoded["links"] = [{"traceId": f"{trace:032x}", "spanId": f"{of:016x}"} for trace, of in span.links]
    return encoded


def _encode_attributes(attributes: Mapping[str, Value]) -> list[dict[str, object]]:
    return [{"key": name, "value": _encode_value(value)} for name, value in attributes.items()]


def _encode_value(value: Value) -> dict[str, object]:
    match value:
        case bool():
            return {"boolValue": value}
        case int():
            return {"intValue": str(min(value, MAX_INTEGER))}
        case float():
            return {"doubleValue": value if math.isfinite(value) else _NOT_FINITE.get(value, "NaN")}
        case str():
            return {"stringValue": value}
        case tuple():
            return {"arrayValue": {"values": [_encode_value(each) for each in value]}}
