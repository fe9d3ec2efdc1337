"""The bytes of an archive: segment files of checked records, the first of which says what run they are of. Blocking.

A segment is `MAGIC`, then records: length (u4), CRC-32 of the payload (u4), payload; all little-endian. The first payload is a
`SegmentHeader` (msgpack). Every further one is a byte, `BEGUN` or `CONTINUED`, and an `ArchivedEntry` (msgpack) as a piece of a
deflate stream that begins or goes on with it: an entry resembles those before it more than itself. In format 1 it is the
`ArchivedEntry` as it is. A record is whole or it does not count (docs/decisions/0203-an-archive-is-one-stream.md).
"""

import os
import re
import struct
import zlib
from collections.abc import Iterator
from contextlib import suppress
from io import BufferedReader
from pathlib import Path
from typing import Any

import msgspec

from fleetbus.bus.base import StreamEntry
from fleetbus.errors import UserError
from fleetbus_schemas.message import UNREADABLE

FORMAT = 2
PLAIN_FORMAT = 1
"""Of archives that were written before; read for ever."""

LEVEL = 6
BEGUN, CONTINUED = b"\1", b"\0"
MAGIC = b"fbarchiv"
SUFFIX = ".fbarchive"
LOCK = "lock"
"""File beside the segments that their one writer holds: an archive that has it is one, though nothing stands in it yet."""

GUARD_FILE = "trimmed.json"
"""File beside the segments with their `Guard`."""

MAX_RECORD_BYTES = 8 << 20
"""A length beyond this is damage: a message has 1 MiB at most."""

_PREFIX = struct.Struct("<II")

_FRAME_OF_ENTRY = re.compile(rb"(?s)(?=(?!\0\0\0)..[\0-\x7f]\0....[\0\1\x94])")
"""Where a length can stand that an entry of either format follows."""


class ArchiveDamaged(UserError):
    """A segment does not hold what was written to it: restore it from a copy."""


class TornRecord(Exception):
    """The file ends within a record, or the record's check sum is wrong; ``offset`` is where it begins."""

    def __init__(self, offset: int) -> None:
        super().__init__(f"no whole record at byte {offset}")
        self.offset = offset


class Guard(msgspec.Struct, frozen=True, kw_only=True):
    """The sequence up to which the log may have been trimmed: an archive that ends before this sequence has lost something."""

    trimmed: int = 0


class SegmentHeader(msgspec.Struct, frozen=True, kw_only=True):
    """The run that a segment is of, the version of the format, the sequence of the segment's first entry."""

    run: str
    format: int
    first: int


class ArchivedEntry(msgspec.Struct, frozen=True, array_like=True):
    """One entry of the log."""

    sequence: int
    time_ns: int
    subject: str
    payload: bytes


_encode = msgspec.msgpack.Encoder().encode
_decode_header = msgspec.msgpack.Decoder(SegmentHeader).decode
_decode_entry = msgspec.msgpack.Decoder(ArchivedEntry).decode


def build_segment_path(folder: Path, first: int) -> Path:
    """The segment that begins with that sequence; names sort like sequences."""
    return folder / f"{first:020d}{SUFFIX}"


def list_segments(folder: Path) -> list[Path]:
    """All segments in order."""
    return sorted(path for path in folder.glob(f"*{SUFFIX}") if is_segment(path.name))


def is_segment(name: str) -> bool:
    """True if a file of that name is one."""
    number = name.removesuffix(SUFFIX)
    return number != name and number.isdecimal()


def parse_first_sequence(segment: Path) -> int:
    """The sequence of a segment's first entry, which is its file's name."""
    return int(segment.stem)


def encode_segment_start(run: str, first: int) -> bytes:
    """The bytes before the first entry of a segment."""
    return MAGIC + encode_frame(_encode(SegmentHeader(run=run, format=FORMAT, first=first)))


class EntryEncoder:
    """Encodes entries that are written one after another; a segment that is opened again takes another encoder."""

    def __init__(self) -> None:
        self._stream = zlib.compressobj(LEVEL, zlib.DEFLATED, -zlib.MAX_WBITS)
        self._kind = BEGUN

    def encode(self, entry: StreamEntry) -> bytes:
        """The record of one entry."""
        content = _encode(ArchivedEntry(entry.sequence, entry.time_ns, entry.subject, entry.payload))
        piece = self._stream.compress(content) + self._stream.flush(zlib.Z_SYNC_FLUSH)
        kind, self._kind = self._kind, CONTINUED
        return encode_frame(kind + piece)


def read_header(file: BufferedReader, segment: Path, run: str | None) -> int:
    """Read up to the first entry, and return the format; raises `TornRecord`, or `UserError` for another run or format."""
    if file.read(len(MAGIC)) != MAGIC:
        raise TornRecord(0)
    try:
        header = _decode_header(read_frame(file))
    except UNREADABLE as error:
        raise ArchiveDamaged(f"{segment} begins with what no recorder wrote: restore it from a copy") from error
    if header.format not in (FORMAT, PLAIN_FORMAT):
        raise UserError(f"{segment} has format {header.format}; this fleetbus reads up to {FORMAT}: upgrade it")
    if run is not None and header.run != run:
        raise UserError(f"{segment.parent} is the archive of run {header.run}, not of {run}: give another --archive")
    return header.format


def read_entries(file: BufferedReader, format: int = FORMAT) -> Iterator[StreamEntry]:
    """The entries from here to the end of the file; raises `TornRecord`, and `ArchiveDamaged` for a whole record of what can
    be no entry."""
    stream = None
    while file.peek(1):
        offset = file.tell()
        content = read_frame(file)
        if format != PLAIN_FORMAT:
            stream = zlib.decompressobj(-zlib.MAX_WBITS) if content[:1] == BEGUN or stream is None else stream
            content = _decompress(stream, content[1:], offset)
        try:
            entry = _decode_entry(content)
        except UNREADABLE as error:
            raise _refuse(file, offset) from error
        if not is_stored_subject(entry.subject):
            raise _refuse(file, offset)
        yield StreamEntry(sequence=entry.sequence, time_ns=entry.time_ns, subject=entry.subject, payload=entry.payload)


def is_stored_subject(subject: str) -> bool:
    """True for subjects with a kind and a name, and for the floor, which needs none."""
    return subject.count(".") >= 3 or (subject.count(".") == 2 and subject.endswith(".floor"))


def _refuse(file: BufferedReader, offset: int) -> ArchiveDamaged:
    name = getattr(file, "name", "a segment of the store")
    return ArchiveDamaged(f"{name} holds at byte {offset} what no recorder wrote: restore it from a copy")


def _decompress(stream: Any, piece: bytes, offset: int) -> bytes:
    try:
        content: bytes = stream.decompress(piece, MAX_RECORD_BYTES)
    except zlib.error as error:
        raise TornRecord(offset) from error
    if stream.unconsumed_tail:
        raise TornRecord(offset)
    return content


def encode_frame(payload: bytes) -> bytes:
    """A payload with its length and check sum before it."""
    return _PREFIX.pack(len(payload), zlib.crc32(payload)) + payload


def read_frame(file: BufferedReader) -> bytes:
    """The payload of the next whole frame; raises `TornRecord`."""
    offset = file.tell()
    prefix = file.read(_PREFIX.size)
    if len(prefix) < _PREFIX.size:
        raise TornRecord(offset)
    length, check = _PREFIX.unpack(prefix)
    payload = file.read(length) if length <= MAX_RECORD_BYTES else b""
    if len(payload) < length or not payload or zlib.crc32(payload) != check:
        raise TornRecord(offset)
    return payload


def is_damage(segment: Path, offset: int) -> bool:
    """True if whole records follow the one at ``offset`` that is not: a crash tears off the end and no more. A record that is
    whole by now was being written when it was read."""
    with segment.open("rb") as file:
        file.seek(offset)
        rest = memoryview(file.read())
    if rest[: len(MAGIC)] == MAGIC or _is_frame(rest, 0):
        return False
    return any(_is_frame(rest, found.start()) for found in _FRAME_OF_ENTRY.finditer(rest, 1))


def _is_frame(data: memoryview, offset: int) -> bool:
    if len(data) - offset < _PREFIX.size:
        return False
    length, check = _PREFIX.unpack_from(data, offset)
    payload = data[offset + _PREFIX.size :][:length]
    return bool(payload) and len(payload) == length and bool(zlib.crc32(payload) == check)


def read_guard(folder: Path) -> int:
    """The sequence up to which the log may have been trimmed, by the note beside the segments. Raises `ArchiveDamaged`."""
    with suppress(FileNotFoundError):
        try:
            return msgspec.json.decode((folder / GUARD_FILE).read_bytes(), type=Guard).trimmed
        except UNREADABLE as error:
            raise ArchiveDamaged(f"{folder / GUARD_FILE} cannot be read: restore it from a copy") from error
    return 0


def check_guard(folder: Path, last: int, guarded: int) -> None:
    """Raise `ArchiveDamaged` for an archive whose ``last`` entry is before what the log was trimmed up to."""
    if last < guarded:
        raise ArchiveDamaged(
            f"{folder} ends at entry {last}, but the log was trimmed up to {guarded}: restore its newest segments from a copy"
        )


def replace_synced(file: Path, content: bytes) -> None:
    """Write a file beside the segments in place of the one that is there, whole and durable, or not at all."""
    partial = file.with_name(f".{file.name}.part")
    with partial.open("wb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())
    partial.replace(file)
    sync_folder(file.parent)


def sync_folder(folder: Path) -> None:
    """Make durable which files a folder has."""
    sync_file(folder)


def sync_file(file: Path) -> None:
    """Make durable what is in a file."""
    handle = os.open(file, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
