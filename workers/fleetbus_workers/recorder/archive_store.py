"""An archive's segments in any place that fsspec writes, as ``s3://bucket/path``: copied, listed, removed, fetched. Blocking.

Segments have the names that they have in the folder, and lie as they are there. A size that is listed is a store's word;
`holds` reads the bytes back. Above it is the recorder, and whoever reads an archive that is not here.
"""

from __future__ import annotations

import io
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from fleetbus.log.archive_format import SUFFIX, is_segment, parse_first_sequence
from fleetbus.log.archive_retention import NOTE, Removed, Segment, parse_removed, read_first_time
from fleetbus_workers.weights.store import open_filesystem, raise_os_error

HEAD_BYTES = 1 << 20
"""Read of a segment for the time of its first entry, which is smaller than this."""

CHUNK_BYTES = 1 << 20
"""Compared at a time."""

S3_SECONDS = 15.0
"""For one answer of a server of S3."""

S3_TRIES = 2
"""Of a request by botocore, and of that by s3fs: a server that says nothing is left after a minute, and not after six, for
which a recorder that drains would wait. Its next call tries again."""

COPY_SECONDS = 60.0
"""A call begins no copy later: a recorder that drains waits for the one that is at work."""


class ArchiveStore:
    """The place at ``url``; raises `UserError` for one that fsspec does not know, and `OSError` from every call."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self._files: Any = _open_files(self.url)
        self._begins: dict[int, int] = {}

    def list_sizes(self) -> dict[str, int]:
        """The segments that are there and count, in order, with their bytes."""
        below, sizes = self.read_removed().below, self._list()
        return {name: sizes[name] for name in sorted(sizes) if parse_first_sequence(Path(name)) >= below}

    def describe_segments(self) -> list[Segment]:
        """The segments that count."""
        return [Segment(first=parse_first_sequence(Path(name)), size_bytes=size) for name, size in self.list_sizes().items()]

    def read_begin(self, segment: Segment) -> int:
        """The time at which the first entry of a segment was stored, as `fleetbus.log.archive_retention.read_begin` has it."""
        if segment.first not in self._begins:
            name = f"{segment.first:020d}{SUFFIX}"
            with raise_os_error(self.url):
                head = self._files.cat_file(f"{self.url}/{name}", start=0, end=HEAD_BYTES)
            self._begins[segment.first] = read_first_time(io.BufferedReader(io.BytesIO(head)), Path(name))
        return self._begins[segment.first]

    def put(self, segment: Path) -> None:
        """Copy a segment in place of what is there under its name."""
        with raise_os_error(self.url):
            self._files.makedirs(self.url, exist_ok=True)
            self._files.put_file(str(segment), f"{self.url}/{segment.name}")

    def fetch(self, name: str, size_bytes: int, folder: Path) -> None:
        """Write a segment to a folder, with all the bytes that the store lists, or not at all."""
        partial = folder / f".{name}.part"
        with raise_os_error(self.url):
            self._files.get_file(f"{self.url}/{name}", str(partial))
        if (found := partial.stat().st_size) != size_bytes:
            partial.unlink()
            raise OSError(f"{self.url} lists {name} with {size_bytes} bytes, and gives back {found}: repeat this")
        partial.replace(folder / name)

    def holds(self, segment: Path) -> bool:
        """True if the store gives back the very bytes of a segment."""
        with raise_os_error(self.url), suppress(FileNotFoundError):
            self._files.invalidate_cache()
            with segment.open("rb") as here, self._files.open(f"{self.url}/{segment.name}", "rb") as there:
                while (expected := here.read(CHUNK_BYTES)) == there.read(CHUNK_BYTES):
                    if not expected:
                        return True
        return False

    def read_removed(self) -> Removed:
        """The part that the store says that it no longer holds."""
        with raise_os_error(self.url):
            try:
                content = self._files.cat_file(f"{self.url}/{NOTE}")
            except FileNotFoundError:
                return Removed()
        return parse_removed(content, f"{NOTE} in the archive's store")

    def remove_segments(self, removed: Removed) -> int:
        """Let the archive in the store begin where ``removed`` says, if it does not begin later; returns how many segments
        went. First the note, then the segments: killed in between, it begins where the note says, and the next call removes
        the rest."""
        below = self._note_removed(removed)
        gone = [name for name in sorted(self._list()) if parse_first_sequence(Path(name)) < below]
        with raise_os_error(self.url):
            for name in gone:
                with suppress(FileNotFoundError):
                    self._files.rm_file(f"{self.url}/{name}")
        return len(gone)

    def copy(self, segments: Sequence[Path], *, removed: Removed) -> bool:
        """Copy those of ``segments`` that the store lists with another size or not at all, in their order, but for what its own
        retention removed. An empty store begins where the folder does, of which ``removed`` is gone. False if some are left for
        the next call: those of an archive of years take hours."""
        stored = self.list_sizes()
        below = self.read_removed().below if stored else self._note_removed(removed)
        ends = time.monotonic() + COPY_SECONDS
        for segment in segments:
            if parse_first_sequence(segment) >= below and stored.get(segment.name) != segment.stat().st_size:
                if time.monotonic() > ends:
                    return False
                self.put(segment)
        return True

    def _note_removed(self, removed: Removed) -> int:
        """The sequence from which on the store says, when it is read again, that it has everything. A note is written beside
        the one that is there: a disk without room would leave neither."""
        if removed.below > self.read_removed().below:
            with raise_os_error(self.url):
                self._files.makedirs(self.url, exist_ok=True)
                self._files.pipe_file(f"{self.url}/{NOTE}.part", msgspec.json.encode(removed))
                self._files.mv(f"{self.url}/{NOTE}.part", f"{self.url}/{NOTE}")
        return self.read_removed().below

    def _list(self) -> dict[str, int]:
        """All segments that are there, with their bytes."""
        with raise_os_error(self.url):
            self._files.invalidate_cache()
            try:
                found = self._files.ls(self.url, detail=True)
            except FileNotFoundError:
                return {}
        sizes = {Path(each["name"]).name: int(each["size"] or 0) for each in found if each["type"] == "file"}
        return {name: size for name, size in sizes.items() if is_segment(name)}


def _open_files(url: str) -> Any:
    """The file system of a place; one of S3 with limits of ours."""
    if url.partition("://")[0] not in ("s3", "s3a"):
        return open_filesystem(url)
    tries = {"total_max_attempts": S3_TRIES, "mode": "standard"}
    files = open_filesystem(url, config_kwargs={"connect_timeout": S3_SECONDS, "read_timeout": S3_SECONDS, "retries": tries})
    files.retries = S3_TRIES
    return files
