"""Entries of a log on their way into a `TextIndex`: in batches, in a thread, from where the index ends."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

import anyio.to_thread
import structlog

from fleetbus.bus.base import LogBus, StreamEntry
from fleetbus.recording.said_text import find_said_text, list_said_subjects
from fleetbus.recording.text_index import TextIndex
from fleetbus_schemas import Subjects

BATCH_ENTRIES, BATCH_BYTES = 5000, 16 << 20

ScanFrom = Callable[[int], AsyncGenerator[StreamEntry]]

log = structlog.get_logger()


async def update_text_index(index: TextIndex, scan: ScanFrom, last_sequence: int | None = None) -> None:
    """Index what the log has beyond the index's end. ``scan`` reads the log from a sequence on; ``last_sequence``: the log's,
    asked for before: an index that has more is of a log that went back in time, and made anew. Raises `sqlite3.Error`."""
    start = await anyio.to_thread.run_sync(lambda: index.last_sequence)
    if last_sequence is not None and start > last_sequence:
        await anyio.to_thread.run_sync(index.clear)
        start = 0
    if start == last_sequence:
        return
    batch: list[StreamEntry] = []
    size = 0
    async with aclosing(scan(start + 1)) as entries:
        async for entry in entries:
            batch.append(entry)
            size += len(entry.payload)
            if len(batch) == BATCH_ENTRIES or size > BATCH_BYTES:
                await anyio.to_thread.run_sync(_add, index, batch, 0)
                batch, size = [], 0
    await anyio.to_thread.run_sync(_add, index, batch, last_sequence or 0)


def _add(index: TextIndex, batch: list[StreamEntry], end: int) -> None:
    texts = [text for entry in batch if (text := find_said_text(entry)) is not None]
    index.add(texts, max(end, batch[-1].sequence if batch else 0))


async def update_from_log(index: TextIndex, bus: LogBus, subjects: Subjects) -> None:
    """Index what the run's log has beyond the index's end. Raises as the bus does, and `sqlite3.Error`."""

    async def scan(start: int) -> AsyncGenerator[StreamEntry]:
        entries = bus.scan(list_said_subjects(subjects), start=start)
        try:
            async for entry in entries:
                yield entry
        finally:
            if isinstance(entries, AsyncGenerator):
                await entries.aclose()

    await update_text_index(index, scan, (await bus.log_state()).last_sequence)


@asynccontextmanager
async def open_text_index(file: Path | None, log_identity: str) -> AsyncIterator[TextIndex]:
    """The index in ``file``, or one in a temporary file where there is none or it cannot be written."""
    index = await anyio.to_thread.run_sync(_try_open, file, log_identity) if file is not None else None
    if index is not None:
        with index:
            yield index
        return
    with (
        tempfile.TemporaryDirectory(prefix="fleetbus-text-") as folder,
        TextIndex(Path(folder) / "text.sqlite", log_identity) as index,
    ):
        yield index


def _try_open(file: Path, log_identity: str) -> TextIndex | None:
    if not file.parent.is_dir():
        return None
    try:
        return TextIndex(file, log_identity)
    except Exception as error:  # noqa: BLE001 - a read-only folder, a full disk: SQLite's errors and the system's
        log.warning("text index cannot be kept; making one in a temporary file", file=str(file), reason=str(error))
        return None
