"""Spans to an OTLP receiver over HTTP, by OpenTelemetry's own SDK and exporter: the only file that imports them.

The SDK starts and ends every span with the ids and times that are given; nothing is installed globally and nothing is
sampled again. Headers (keys of a vendor), certificates, compression and time limits come from the exporter's own variables
``OTEL_EXPORTER_OTLP_*``, so that secrets are on no command line.
"""

import logging
import re
from collections.abc import Sequence
from urllib.parse import urlsplit

from opentelemetry import trace as api
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanLimits, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.sdk.trace.sampling import ALWAYS_ON

from fleetbus.config.load import strip_credentials
from fleetbus.errors import UserError
from fleetbus_workers.observe.tracing.span import SCOPE, Span, SpansRefused, build_resource_attributes

PATH = "/v1/traces"
MAX_REASON_CHARACTERS = 300
SAMPLED = api.TraceFlags(api.TraceFlags.SAMPLED)


class OtlpSink:
    """Raises `UserError` for what is no URL of a receiver. A receiver that does not answer is `SpansRefused`, after the
    exporter's own tries (10 s unless ``OTEL_EXPORTER_OTLP_TIMEOUT`` says otherwise)."""

    def __init__(self, url: str, *, run: str) -> None:
        self._endpoint = resolve_endpoint(url)
        self._run = run
        self._ids = _PresetIdGenerator()
        self._ended = _EndedSpanBuffer()
        self._tracers: dict[tuple[str, str], api.Tracer] = {}
        self._complaints = _ExporterLog()
        self._exporter = OTLPSpanExporter(self._endpoint)

    def write(self, spans: Sequence[Span]) -> None:
        for span in spans:
            self._replay_span(span)
        batch = self._ended.drain()
        self._complaints.last = ""
        with self._complaints:
            result = self._exporter.export(batch)
        if result is not SpanExportResult.SUCCESS:
            reason = f": {self._complaints.last}" if self._complaints.last else ""
            raise SpansRefused(f"{strip_credentials(self._endpoint)} does not take spans{reason}")

    def close(self) -> None:
        self._exporter.shutdown()  # type: ignore[no-untyped-call]

    def _replay_span(self, span: Span) -> None:
        self._ids.trace_id, self._ids.span_id = span.trace_id, span.span_id
        begun = self._get_tracer(span.role, span.worker).start_span(
            span.name,
            context=_build_parent_context(span.trace_id, span.parent_id),
            attributes=dict(span.attributes),
            links=[api.Link(_build_span_context(trace, of)) for trace, of in span.links],
            start_time=span.start_ns,
        )
        if span.error:
            begun.set_status(api.StatusCode.ERROR, span.error)
        begun.end(span.end_ns)

    def _get_tracer(self, role: str, worker: str) -> api.Tracer:
        if (role, worker) not in self._tracers:
            provider = TracerProvider(
                sampler=ALWAYS_ON,
                resource=Resource.create({**build_resource_attributes(self._run, role, worker)}),
                shutdown_on_exit=False,
                id_generator=self._ids,
                span_limits=SpanLimits(max_span_attributes=SpanLimits.UNSET, max_links=SpanLimits.UNSET),
            )
            provider.add_span_processor(self._ended)
            self._tracers[role, worker] = provider.get_tracer(SCOPE)
        return self._tracers[role, worker]


def resolve_endpoint(url: str) -> str:
    """The address that spans are posted to: a base URL gets the protocol's path, as ``OTEL_EXPORTER_OTLP_ENDPOINT`` would."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise UserError(f"--otlp {strip_credentials(url)} is not the URL of a receiver such as http://127.0.0.1:4318")
    return url if parts.path.endswith(PATH) else url.rstrip("/") + PATH


class _PresetIdGenerator(IdGenerator):
    """The ids that the next span is to have."""

    trace_id = span_id = 0

    def generate_trace_id(self) -> int:
        return self.trace_id

    def generate_span_id(self) -> int:
        return self.span_id


class _EndedSpanBuffer(SpanProcessor):
    """Spans that ended and were not sent yet."""

    def __init__(self) -> None:
        self._spans: list[ReadableSpan] = []

    def on_end(self, span: ReadableSpan) -> None:
        self._spans.append(span)

    def drain(self) -> list[ReadableSpan]:
        spans, self._spans = self._spans, []
        return spans


class _ExporterLog(logging.Handler):
    """Captures the log of the exporter during an export: the reason of a failure is nowhere else."""

    def __init__(self) -> None:
        super().__init__()
        self.last = ""
        self._logger = logging.getLogger("opentelemetry.exporter.otlp.proto.http.trace_exporter")
        self._propagates = True

    def emit(self, record: logging.LogRecord) -> None:
        if "due to timeout" in record.msg:  # it gave up; what it tried before says why
            self.last = self.last or "no answer in time"
            return
        reason = str(record.args[0]) if isinstance(record.args, tuple) and "Transient" in record.msg else record.getMessage()
        system = re.search(r"\[Errno -?\d+\] ([^\"')]+)", reason)
        self.last = system[1].strip() if system else reason[:MAX_REASON_CHARACTERS]

    def __enter__(self) -> None:
        self._propagates, self._logger.propagate = self._logger.propagate, False
        self._logger.addHandler(self)

    def __exit__(self, *_: object) -> None:
        self._logger.removeHandler(self)
        self._logger.propagate = self._propagates


def _build_span_context(trace: int, span: int) -> api.SpanContext:
    return api.SpanContext(trace, span, is_remote=False, trace_flags=SAMPLED)


def _build_parent_context(trace: int, parent: int) -> Context:
    """Without a parent the SDK asks for a new trace id, and gets the given one."""
    return api.set_span_in_context(api.NonRecordingSpan(_build_span_context(trace, parent)), Context()) if parent else Context()
