"""Writing a recording: entries gathered into compressed frames, files in pieces, an end that says all is there. Blocking."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from io import BufferedWriter
from pathlib import Path

from fleetbus.bus.base import StreamEntry
from fleetbus.errors import UserError
from fleetbus.recording.format import FilePart, RecordingEnd, RecordingHeader, encode_archived_entry, encode_part, encode_start

FRAME_ENTRIES = 1024
"""Most entries of a frame: what a torn tail can cost."""

FRAME_BYTES = 1 << 20
"""A frame is closed when its payloads reach this."""

FILE_PART_BYTES = 4 << 20


class RecordingWriter:
    """Appends to one recording; made by `create_recording`."""

    def __init__(self, file: BufferedWriter) -> None:
        self._file = file
        self._waiting: list[StreamEntry] = []
        self._waiting_bytes = 0
        self.entries = 0
        self.last_sequence = 0
        self.size_bytes = 0
        self.is_torn = False
        """True for what lacks entries at its end: then it gets none that says that all is there."""
        self.is_kept = False
        """True for what stays after any error, readable up to there."""
        self.place: tuple[Path, Path] | None = None
        """The file that is written, and the one that it will replace."""

    def add(self, entries: Sequence[StreamEntry]) -> None:
        """Append entries, in order after those before; whole frames are written."""
        for entry in entries:
            self._waiting.append(entry)
            self._waiting_bytes += len(entry.payload)
            if len(self._waiting) >= FRAME_ENTRIES or self._waiting_bytes >= FRAME_BYTES:
                self._close_frame()

    def flush(self) -> None:
        """Hand everything to the operating system: another process can read it then."""
        self._close_frame()
        self._file.flush()

    def add_content(self, name: str, content: bytes) -> None:
        """Record ``content`` as a file called ``name``."""
        self._close_frame()
        for offset in range(0, max(len(content), 1), FILE_PART_BYTES):
            data = content[offset : offset + FILE_PART_BYTES]
            self._write(encode_part(FilePart(name, offset, data, offset + len(data) >= len(content))))

    def add_file(self, name: str, path: Path) -> None:
        """Record a file under ``name``; raises `OSError`."""
        self._close_frame()
        size, offset = path.stat().st_size, 0
        with path.open("rb") as source:
            while True:
                data = source.read(FILE_PART_BYTES)
                last = offset + len(data) >= size
                self._write(encode_part(FilePart(name, offset, data, last)))
                offset += len(data)
                if last:
                    return

    def take_place(self) -> None:
        """Replace the file that is overwritten, if one is, and stay whatever happens then. Raises `UserError`."""
        self.is_kept = True
        if self.place is None:
            return
        written, replaced = self.place
        try:
            written.replace(replaced)
        except OSError as error:
            raise UserError(f"{replaced} cannot be replaced: {error.strerror}") from error
        self.place = None

    def finish(self) -> None:
        """Write the end, unless it is torn; nothing follows it."""
        self._close_frame()
        if not self.is_torn:
            self._write(encode_part(RecordingEnd(self.entries, self.last_sequence)))
        self._file.flush()

    def write_header(self, header: RecordingHeader) -> None:
        self._write(encode_start(header))
        self._file.flush()

    def _close_frame(self) -> None:
        if not self._waiting:
            return
        self._write(encode_part([encode_archived_entry(entry) for entry in self._waiting]))
        self.entries += len(self._waiting)
        self.last_sequence = self._waiting[-1].sequence
        self._waiting, self._waiting_bytes = [], 0

    def _write(self, data: bytes) -> None:
        self._file.write(data)
        self.size_bytes += len(data)


@contextmanager
def create_recording(path: Path, header: RecordingHeader, *, overwrite: bool = False) -> Iterator[RecordingWriter]:
    """A recording at ``path`` for the length of the block; raises `UserError` if there is a file, or none can be made.

    It gets its end when the block ends by itself. An error leaves it torn, and readable up to there; bad input (`UserError`)
    and a full disk (`OSError`) leave no file, unless `RecordingWriter.take_place` was called before. A file that is overwritten
    stays until the block has ended, or until that call.
    """
    if not (overwrite and path.is_file()):
        with _open_recording(path, header, overwrite=overwrite) as writer:
            yield writer
        return
    part = path.with_name(f"{path.name}.{os.getpid()}.part")  # what is overwritten may be what is read, or all that is left
    try:
        with _open_recording(part, header, overwrite=True) as writer:
            writer.place = (part, path)
            yield writer
        writer.take_place()
    finally:
        part.unlink(missing_ok=True)


@contextmanager
def _open_recording(path: Path, header: RecordingHeader, *, overwrite: bool) -> Iterator[RecordingWriter]:
    try:
        file = path.open("wb" if overwrite else "xb")
    except FileExistsError:
        raise UserError(f"{path} exists already: give another --output, or --force to replace it") from None
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}") from error
    with file:
        writer = RecordingWriter(file)
        try:
            writer.write_header(header)
            yield writer
            writer.finish()
        except (UserError, OSError):
            if path.is_file() and not writer.is_kept:  # a pipe or a device was there before
                path.unlink()
            raise
