"""The samples in a log of Inspect: a zip of JSON files, one per sample. Bounded, and one at a time. Blocking."""

from __future__ import annotations

import importlib
import lzma
import struct
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fleetbus.errors import UserError

MAX_SAMPLE_BYTES = 256 << 20
MAX_SAMPLES = 1_000_000

MAX_VALUES = 16_000_000
"""Lists, objects and what stands in them: little is packed into much, and in memory it is larger again."""

ZSTANDARD = 93
"""The compression that Inspect uses, which Python reads from 3.14 on."""

LOCAL_HEADER_BYTES = 30


def iterate_samples(path: Path) -> Iterator[tuple[bytes, str]]:
    """The JSON of each sample and its place. Raises `UserError` for what is no such file."""
    try:
        with zipfile.ZipFile(path) as archive:
            members = [each for each in archive.infolist() if each.filename.startswith("samples/")]
            if "header.json" not in archive.NameToInfo and "_journal/start.json" not in archive.NameToInfo:
                raise UserError(f"{path} is no log of Inspect: it has no header")
            if len(members) > MAX_SAMPLES:
                raise UserError(f"{path} has more than {MAX_SAMPLES} samples")
            newest = {member.filename: member for member in members if member.filename.endswith(".json")}
            for name, member in newest.items():
                yield _read_member(archive, member, path), f"{path}, {name}"
    except (zipfile.BadZipFile, zlib.error, lzma.LZMAError, struct.error, EOFError, RuntimeError, ValueError) as error:
        raise UserError(f"{path} cannot be read as a log of Inspect: {error}") from error


def _read_member(archive: zipfile.ZipFile, member: zipfile.ZipInfo, path: Path) -> bytes:
    if member.compress_type == ZSTANDARD:
        data = _read_zstandard(archive, member, path)
    else:
        with archive.open(member) as file:
            data = file.read(MAX_SAMPLE_BYTES + 1)
    if len(data) > MAX_SAMPLE_BYTES:
        raise UserError(f"{path}, {member.filename} is larger than {MAX_SAMPLE_BYTES >> 20} MiB")
    if sum(map(data.count, b"[{,")) > MAX_VALUES:
        raise UserError(f"{path}, {member.filename} has more than {MAX_VALUES} values")
    return data


def _read_zstandard(archive: zipfile.ZipFile, member: zipfile.ZipInfo, path: Path) -> bytes:
    """The content of a member that `zipfile` cannot decompress."""
    try:
        zstandard: Any = importlib.import_module("zstandard")
    except ModuleNotFoundError as error:
        if error.name != "zstandard":
            raise
        raise UserError(f"{path} is compressed with zstandard: pip install 'fleetbus[inspect]'") from error
    with path.open("rb") as file:
        file.seek(member.header_offset)
        header = file.read(LOCAL_HEADER_BYTES)
        file.seek(int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little"), 1)
        packed = file.read(min(member.compress_size, MAX_SAMPLE_BYTES))
    try:
        with zstandard.ZstdDecompressor().stream_reader(packed, read_across_frames=True) as reader:
            data: bytes = reader.read(MAX_SAMPLE_BYTES + 1)
    except zstandard.ZstdError as error:
        raise zipfile.BadZipFile(str(error)) from error
    return data
