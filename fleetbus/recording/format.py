"""The bytes of a recording: one file that says what it is and holds a run's log, or part of it. Blocking.

A recording is `MAGIC`, then the checked frames of `log.archive_format`. The first one is a `RecordingHeader` (msgpack); of
every further one the first byte is its kind and the rest is zlib-compressed msgpack:

* ``E``: a list of `ArchivedEntry`, in order of sequence;
* ``F``: a `FilePart`, a piece of a file that was recorded with the log: weights, or, with a name that begins with `OBJECTS`,
  an object of the run's bucket;
* ``Z``: a `RecordingEnd`. Without it the writer was cut off: what is whole before is readable.
"""

from __future__ import annotations

import hashlib
import os
import zlib
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from fleetbus.bus.base import StreamEntry
from fleetbus.errors import UserError
from fleetbus.log.archive_format import ArchivedEntry, TornRecord, encode_frame, read_frame
from fleetbus_schemas import MESSAGES
from fleetbus_schemas.message import UNREADABLE
from fleetbus_schemas.subjects import InvalidName, check_name

FORMAT = 1
MAGIC = b"fbrecord"
SUFFIX = ".fbrec"
COMPRESSION_LEVEL = 1
"""Level 6 makes files 7 % smaller and takes three times as long."""

MAX_FRAME_CONTENT_BYTES = 64 << 20
"""Decompressed content beyond this is damage, or an attack."""

MAX_FRAME_ENTRIES = 1 << 16
"""Sixty-four times what a writer puts into one frame."""

MAX_EXPANSION = 32
"""All of a recording, decompressed, has at most so many times the bytes of its file, and `FREE_BYTES`; logs have 5 to 20."""

FREE_BYTES = 64 << 20
ENTRY_BYTES = 256
"""What an entry takes in memory besides its content; counted, so that millions of empty ones are not free."""

_TOO_LARGE = f"expands to more than {MAX_EXPANSION} times its size: it is damaged, or made to fill the memory"

OBJECTS = "objects/"
"""Name of an object's file: this and the object's name."""

ENTRIES, FILE, END = b"E", b"F", b"Z"


class RecordingDamaged(UserError):
    """The file is no recording, or its header is not whole."""


class RecordingTooLarge(UserError):
    """The file holds more than a recording of its size can."""


class RecordingHeader(msgspec.Struct, frozen=True, kw_only=True):
    """The origin of a recording. ``messages`` is the `compute_message_schema` of the writer, ``created_ns`` Unix nanoseconds;
    ``configuration`` has the run's tables without secrets, empty if they were not at hand; ``selected`` are the episodes it was
    reduced to, none for a whole log; ``redacted`` says that secrets were taken out of it; ``begins`` is the position of the
    first entry that could be recorded: those before it had been removed for good."""

    run: str
    format: int = FORMAT
    fleetbus: str = ""
    messages: str = ""
    created_ns: int = 0
    configuration: dict[str, Any] = msgspec.field(default_factory=dict)
    selected: tuple[str, ...] = ()
    redacted: bool = True
    begins: int = 1


class FilePart(msgspec.Struct, frozen=True, array_like=True):
    """``data`` stands at ``offset`` of the file of that name; ``last`` marks its end."""

    name: str
    offset: int
    data: bytes
    last: bool


class RecordingEnd(msgspec.Struct, frozen=True, array_like=True):
    """Written when a recording was finished in order."""

    entries: int
    last_sequence: int


Part = list[ArchivedEntry] | FilePart | RecordingEnd

T = TypeVar("T")

_encode = msgspec.msgpack.Encoder().encode
_decode_header = msgspec.msgpack.Decoder(RecordingHeader).decode
_decode_entries = msgspec.msgpack.Decoder(list[ArchivedEntry]).decode
_decode_file = msgspec.msgpack.Decoder(FilePart).decode
_decode_end = msgspec.msgpack.Decoder(RecordingEnd).decode


def compute_message_schema() -> str:
    """A short name for the messages and their fields as this fleetbus knows them."""
    spelled = ";".join(f"{kind.__name__}:{','.join(kind.__struct_fields__)}" for kind in MESSAGES)
    return hashlib.blake2b(spelled.encode(), digest_size=6).hexdigest()


def encode_start(header: RecordingHeader) -> bytes:
    """The bytes before the first part."""
    return MAGIC + encode_frame(_encode(header))


def encode_part(part: Part) -> bytes:
    """One part as a frame."""
    kind = ENTRIES if isinstance(part, list) else FILE if isinstance(part, FilePart) else END
    return encode_frame(kind + zlib.compress(_encode(part), COMPRESSION_LEVEL))


def encode_archived_entry(entry: StreamEntry) -> ArchivedEntry:
    """An entry of the log as recordings keep it."""
    return ArchivedEntry(entry.sequence, entry.time_ns, entry.subject, entry.payload)


def decode_archived_entry(entry: ArchivedEntry) -> StreamEntry:
    """The entry of the log that a recording kept."""
    return StreamEntry(sequence=entry.sequence, time_ns=entry.time_ns, subject=entry.subject, payload=entry.payload)


def read_start(file: BufferedReader, path: Path) -> RecordingHeader:
    """Read up to the first part; raises `RecordingDamaged`, or `UserError` when the format is not known here."""
    if file.read(len(MAGIC)) != MAGIC:
        raise RecordingDamaged(f"{path} is not a recording: create one with `fleetbus record RUN -o FILE{SUFFIX}`")
    try:
        header = _decode_header(read_frame(file))
    except (TornRecord, *UNREADABLE) as error:
        raise RecordingDamaged(f"{path} has no whole header: nothing of it can be read") from error
    if header.format != FORMAT:
        raise UserError(f"{path} has format {header.format}; this fleetbus reads {FORMAT}: upgrade it")
    try:
        check_name("run", header.run)  # it becomes a folder
    except InvalidName as error:
        raise RecordingDamaged(f"{path} has a header that no run can have: {error}") from error
    return header


def read_parts(file: BufferedReader) -> Iterator[Part]:
    """The parts from here to the end of the file; raises `TornRecord` where one is not whole, and `RecordingTooLarge` before
    they take more memory than a file of this size can honestly need."""
    left = FREE_BYTES + MAX_EXPANSION * os.fstat(file.fileno()).st_size
    while file.peek(1):
        offset = file.tell()
        payload = read_frame(file)
        try:
            content = _decompress(payload[1:], min(left, MAX_FRAME_CONTENT_BYTES))
        except zlib.error as error:
            if left < MAX_FRAME_CONTENT_BYTES:
                raise RecordingTooLarge(f"{file.name} {_TOO_LARGE}") from error
            raise TornRecord(offset) from error
        entries = _count_entries(content) if payload[:1] == ENTRIES else 1
        left -= len(content) + ENTRY_BYTES * entries
        if left < 0 or entries > MAX_FRAME_ENTRIES:
            raise RecordingTooLarge(f"{file.name} {_TOO_LARGE}")
        yield _decode_part(payload[:1], content, offset)


def _count_entries(content: bytes) -> int:
    """Number of items of the msgpack list, by its head: known before anything is made of them. 0 for what is no list."""
    first = content[0] if content else 0
    if first & 0xF0 == 0x90:
        return first & 0x0F
    width = {0xDC: 2, 0xDD: 4}.get(first, 0)
    return int.from_bytes(content[1 : 1 + width], "big")


def _decode_part(kind: bytes, content: bytes, offset: int) -> Part:
    decoders: dict[bytes, Any] = {ENTRIES: _decode_entries, FILE: _decode_file, END: _decode_end}
    decoder = decoders.get(kind)
    if decoder is None:
        raise TornRecord(offset)
    try:
        part: Part = decoder(content)
    except UNREADABLE as error:
        raise TornRecord(offset) from error
    return part


def _decompress(data: bytes, limit: int) -> bytes:
    machine = zlib.decompressobj()
    content = machine.decompress(data, limit + 1)
    if len(content) > limit or machine.unconsumed_tail or not machine.eof:
        raise zlib.error("content is not whole, or too long")
    return content
