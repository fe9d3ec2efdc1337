"""From entries to sinks: all of a log, or a log followed while it grows. Nothing is read ahead of what the sinks have taken."""

from collections.abc import AsyncIterator, Sequence

import anyio
import anyio.lowlevel
import anyio.to_thread
import msgspec
import structlog

from fleetbus.bus.base import LogBus, StreamEntry
from fleetbus.recording.redaction import Redactor
from fleetbus_schemas import Subjects
from fleetbus_workers.observe.tracing.fold import LogTraces
from fleetbus_workers.observe.tracing.span import Span, SpanSink, SpansRefused

BATCH_SPANS = 512
"""As many as OpenTelemetry's own batch processor sends at once."""

FLUSH_SECONDS = 1.0
"""While a log is followed, spans are on their way after this."""

RETRY_SECONDS = 5.0

log = structlog.get_logger()


class TraceSummary(msgspec.Struct, kw_only=True):
    """The result of tracing. ``open`` episodes have no result, ``open_sessions`` no end. ``last_sequence`` is the entry up to
    which every span was taken."""

    run: str
    episodes: int = 0
    open: int = 0
    sessions: int = 0
    open_sessions: int = 0
    spans: int = 0
    last_sequence: int = 0


class Tracing:
    """Spans of entries after ``after`` go to the sinks; entries before are read all the same, for what they begin. Secrets are
    taken out of entries as they are for a recording: an error may quote one."""

    def __init__(self, run: str, traces: LogTraces, sinks: Sequence[SpanSink], *, after: int = 0) -> None:
        self._traces = traces
        self._sinks = sinks
        self._after = after
        self._redactor = Redactor()
        self._batch: list[Span] = []
        self._seen = after
        self.written = TraceSummary(run=run, last_sequence=after)

    async def copy(self, entries: AsyncIterator[StreamEntry]) -> None:
        """All of ``entries``; raises `SpansRefused`."""
        async for entry in entries:
            self._add(entry)
            if len(self._batch) >= BATCH_SPANS:
                await self._write()
        await self._write()

    async def follow(self, bus: LogBus, subjects: Subjects, stop: anyio.Event) -> None:
        """The log from its beginning and on, until ``stop`` is set. Once the sinks took something, a failure is tried again."""
        async with bus.read([subjects.log]) as reader, anyio.create_task_group() as group:
            group.start_soon(_cancel_when_set, stop, group.cancel_scope)
            while True:
                self._add(await reader.receive())
                with anyio.move_on_after(FLUSH_SECONDS):
                    while len(self._batch) < BATCH_SPANS:
                        self._add(await reader.receive())
                await self._write_with_retry()
        with anyio.CancelScope(shield=True):  # the remaining spans: the sinks have time limits of their own
            await self._write()

    def _add(self, entry: StreamEntry) -> None:
        self._seen = max(self._seen, entry.sequence)
        spans = list(self._traces.add(self._redactor.clean(entry)))
        if entry.sequence > self._after:
            self._batch += spans

    async def _write_with_retry(self) -> None:
        while True:
            try:
                await self._write()
                return
            except SpansRefused as refused:
                await anyio.lowlevel.checkpoint_if_cancelled()  # whoever cancelled may have closed the sinks
                if not self.written.spans:
                    raise
                log.warning("receiver refused spans; retrying", reason=str(refused), waiting=len(self._batch))
                await anyio.sleep(RETRY_SECONDS)

    async def _write(self) -> None:
        if self._batch:
            await anyio.to_thread.run_sync(self._write_batch)
        self.written.last_sequence = self._seen
        self.written.episodes, self.written.open = self._traces.episodes, self._traces.open
        self.written.sessions, self.written.open_sessions = self._traces.sessions, self._traces.open_sessions

    def _write_batch(self) -> None:
        for sink in self._sinks:
            sink.write(self._batch)
        self.written.spans += len(self._batch)
        self._batch = []


async def _cancel_when_set(stop: anyio.Event, scope: anyio.CancelScope) -> None:
    await stop.wait()
    scope.cancel()
