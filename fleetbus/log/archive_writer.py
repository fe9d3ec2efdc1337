"""Writing an archive: batches of entries appended to segments and synced, continued after a crash without loss or repetition.

What a crash tore off the end is cut when the archive is opened again; the log still has it, because only what was synced is
ever trimmed, and `guard` notes durably how far that went. Blocking; call it from a thread. Above it is the recorder.
"""

import fcntl
import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path
from typing import IO

import msgspec
import structlog

from fleetbus.bus.base import StreamEntry
from fleetbus.errors import UserError
from fleetbus.log.archive_format import (
    FORMAT,
    GUARD_FILE,
    LOCK,
    EntryEncoder,
    Guard,
    TornRecord,
    build_segment_path,
    check_guard,
    encode_segment_start,
    list_segments,
    parse_first_sequence,
    read_entries,
    read_guard,
    read_header,
    replace_synced,
    sync_file,
    sync_folder,
)

SEGMENT_BYTES = 64 << 20

log = structlog.get_logger()


class ArchiveWriter:
    """The one writer of an archive; made by `open_archive`."""

    def __init__(self, folder: Path, run: str, segment_bytes: int, segment_seconds: float) -> None:
        self._folder = folder
        self._run = run
        self._segment_bytes = segment_bytes
        self._segment_ns = segment_seconds * 1e9
        self._begun_ns = 0
        """When the first entry of the segment was stored."""
        self._file: int | None = None
        self._size = 0
        self._encoder = EntryEncoder()
        self._format = FORMAT
        """Of the segment that was looked at last."""
        self.last: StreamEntry | None = None
        """The newest entry that is synced."""
        self.guarded = read_guard(folder)

    @property
    def last_sequence(self) -> int:
        return self.last.sequence if self.last is not None else 0

    def recover(self) -> None:
        """Find the end, also after an append that failed, and cut what is torn there; raises `ArchiveDamaged` when more is gone
        than a crash can tear. What is whole there may have been written and not synced."""
        self.close()
        self.last, self._encoder = None, EntryEncoder()
        for segment in reversed(list_segments(self._folder)):
            size = self._find_end(segment)
            if self.last is None and parse_first_sequence(segment) > self.guarded:
                segment.unlink()
                continue
            if size < segment.stat().st_size:
                self._check_guard()
                log.warning(
                    "archive has a torn tail; truncating it", segment=segment.name, cut_bytes=segment.stat().st_size - size
                )
                os.truncate(segment, size)
            sync_file(segment)
            sync_folder(self._folder)
            if self._format == FORMAT:  # one of before is read, and not continued
                self._file = os.open(segment, os.O_WRONLY | os.O_APPEND)
                self._size = size
            break
        self._check_guard()

    def append(self, entries: Sequence[StreamEntry]) -> None:
        """Write entries, in order after those before, and sync them."""
        for start, stop in self._split_batch(entries):
            if self._file is None or self._is_full(entries[start].time_ns):
                self._begin_segment(entries[start])
            assert self._file is not None
            self._write(b"".join(map(self._encoder.encode, entries[start:stop])))
            os.fsync(self._file)
            self.last = entries[stop - 1]

    def guard(self, sequence: int) -> None:
        """Note durably that the log is trimmed up to ``sequence`` from now on."""
        if sequence > self.guarded:
            replace_synced(self._folder / GUARD_FILE, msgspec.json.encode(Guard(trimmed=sequence)))
            self.guarded = sequence

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _split_batch(self, entries: Sequence[StreamEntry]) -> Iterator[tuple[int, int]]:
        """Cut a batch where it would exceed a segment by much."""
        start = size = 0
        for index, entry in enumerate(entries):
            size += len(entry.payload)
            if size >= self._segment_bytes:
                yield start, index + 1
                start, size = index + 1, 0
        if start < len(entries):
            yield start, len(entries)

    def _write(self, data: bytes) -> None:
        assert self._file is not None
        left = memoryview(data)
        while left:
            left = left[os.write(self._file, left) :]
        self._size += len(data)

    def _is_full(self, time_ns: int) -> bool:
        """True if an entry of that time goes into a segment of its own."""
        return self._size >= self._segment_bytes or time_ns - self._begun_ns >= self._segment_ns

    def _begin_segment(self, entry: StreamEntry) -> None:
        self.close()
        first, self._begun_ns = entry.sequence, entry.time_ns
        path = build_segment_path(self._folder, first)
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL, 0o644)
        self._size = 0
        self._encoder = EntryEncoder()
        self._write(encode_segment_start(self._run, first))
        sync_folder(self._folder)

    def _find_end(self, segment: Path) -> int:
        """Bytes of the segment that are whole; notes the first and the last whole entry."""
        self._begun_ns = 0
        with segment.open("rb") as file:
            try:
                self._format = read_header(file, segment, self._run)
                return self._read_to_end(file)
            except TornRecord as torn:
                return torn.offset

    def _read_to_end(self, file: BufferedReader) -> int:
        for entry in read_entries(file, self._format):
            self._begun_ns = self._begun_ns or entry.time_ns
            self.last = entry
        return file.tell()

    def _check_guard(self) -> None:
        check_guard(self._folder, self.last_sequence, self.guarded)


@contextmanager
def open_archive(
    folder: Path, run: str, *, segment_bytes: int = SEGMENT_BYTES, segment_seconds: float = math.inf
) -> Iterator[ArchiveWriter]:
    """The archive in ``folder``, made if there is none, for one writer at a time; raises `UserError`. A segment takes entries
    up to so many bytes, and of so many seconds."""
    with _open_lock(folder) as holder:
        try:
            fcntl.flock(holder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"{folder} is being written by another recorder: stop it, or give another --archive") from None
        writer = ArchiveWriter(folder, run, segment_bytes, segment_seconds)
        try:
            writer.recover()
            yield writer
        finally:
            writer.close()


def _open_lock(folder: Path) -> IO[str]:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return (folder / LOCK).open("a")
    except OSError as error:
        raise UserError(f"{folder} cannot hold an archive ({error.strerror}): give another --archive") from error
