"""Segments of an archive that somebody else wrote.

An input is bytes of a file, or msgpack of a header and records, which are framed with right lengths and check sums: no fuzzer
guesses those.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from fleetbus.errors import UserError
from fleetbus.log.archive_format import BEGUN, CONTINUED, MAGIC, ArchiveDamaged, build_segment_path, encode_frame
from fleetbus.log.archive_reader import read_archive
from tests.fuzz.mutation import write_msgpack
from tests.fuzz.targets import ROOT, make_folder

TREE = (msgspec.msgpack.decode, msgspec.msgpack.encode)
_FOLDER = make_folder()


def run(data: bytes) -> None:
    """Read it as the newest segment, and as one before the newest."""
    content = build_segment(data)
    folder = Path(_FOLDER.name)
    build_segment_path(folder, 1).write_bytes(content)
    later = build_segment_path(folder, 1 << 40)
    for following in (False, True):
        later.write_bytes(content) if following else later.unlink(missing_ok=True)
        try:
            for entry in read_archive(folder, run=None if following else "run"):
                assert isinstance(entry.payload, bytes)
        except (ArchiveDamaged, UserError) as refused:
            assert str(refused)


def build_segment(data: bytes) -> bytes:
    """The file that an input means."""
    try:
        header, *records = msgspec.msgpack.decode(data, type=list[Any])
        stream = zlib.compressobj(6, zlib.DEFLATED, -zlib.MAX_WBITS)
        frames = [encode_frame(write_msgpack(header))]
        for number, record in enumerate(records):
            if isinstance(record, bytes):
                frames.append(encode_frame(record))
                continue
            piece = stream.compress(write_msgpack(record)) + stream.flush(zlib.Z_SYNC_FLUSH)
            frames.append(encode_frame((CONTINUED if number else BEGUN) + piece))
    except (msgspec.MsgspecError, UnicodeError, ValueError, RecursionError, OverflowError):
        return data
    return MAGIC + b"".join(frames)


def list_seeds() -> Iterator[bytes]:
    """The segments of the tests, as they are and as trees."""
    header = {"run": "run", "format": 2, "first": 1}
    for file in sorted((ROOT / "tests/kept").glob("*/*.fbarchive")):
        yield file.read_bytes()
        entries = [[each.sequence, each.time_ns, each.subject, each.payload] for each in read_archive(file.parent)]
        yield msgspec.msgpack.encode([header, *entries[:8]])
        yield msgspec.msgpack.encode([header | {"format": 1}, *(msgspec.msgpack.encode(each) for each in entries[:3])])
