"""Removing the oldest segments of an archive: what may go, in which order, and what readers know of it. Blocking.

First a note says durably below which entry nothing is read any more, then the segments go, the oldest first. Killed between any
two steps, the archive begins where the note says, whatever is left before it; the next removal finishes what was begun. What is
still needed is not known here: the recorder gives the entry from which on everything stays
(docs/decisions/0229-an-archive-forgets-what-nobody-needs.md).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import cache
from io import BufferedReader
from pathlib import Path

import msgspec

from fleetbus.errors import UserError
from fleetbus.log.archive_format import (
    ArchiveDamaged,
    ArchivedEntry,
    TornRecord,
    list_segments,
    parse_first_sequence,
    read_entries,
    read_header,
    replace_synced,
    sync_folder,
)
from fleetbus_schemas import LineageStarted, MalformedMessage
from fleetbus_schemas.channels import STORED
from fleetbus_schemas.message import UNREADABLE, decode_any

NOTE = "removed.json"
HOUR_NS = 3_600_000_000_000
KEPT_LINEAGES = 256
NO_BEGIN = 1 << 62
"""Later than every entry: what cannot be told is never too old."""


class ArchiveShortened(UserError):
    """Segments were removed while they were read: what is left can be read again."""


class Removed(msgspec.Struct, frozen=True, kw_only=True):
    """The part that an archive no longer holds: every entry below the sequence ``below``. ``lineages`` are the newest
    `KEPT_LINEAGES` beginnings of lineages among them, for the settings in those: an audit of what follows goes by them.
    ``begun_ns``: the latest time by which one of the segments had begun, of those that can be right; 0 if none is known."""

    below: int = 1
    begun_ns: int = 0
    lineages: tuple[ArchivedEntry, ...] = ()


class Segment(msgspec.Struct, frozen=True, kw_only=True):
    """One segment: the sequence of its first entry, and its bytes."""

    first: int
    size_bytes: int


class Keep(msgspec.Struct, frozen=True, kw_only=True):
    """The limits of an archive: entries of so many hours, and so many bytes of segments; 0 is no limit."""

    hours: float = 0.0
    size_bytes: int = 0

    @property
    def is_limited(self) -> bool:
        return self.hours > 0 or self.size_bytes > 0


def choose_first_kept(
    segments: Sequence[Segment],
    keep: Keep,
    *,
    now_ns: int,
    needed: int,
    read_begin: Callable[[Segment], int],
    begun_ns: int = 0,
) -> int:
    """The sequence at which the archive is to begin: that of the oldest segment which stays; 1 if there is none.

    Whole segments go, from the oldest on, as long as all of their entries are too old, or the segments together are too large.
    The newest stays, and so does every one that holds an entry from ``needed`` on. ``read_begin`` has the time of a segment's
    first entry (Unix nanoseconds), and is asked for no more segments than it takes, once for each. ``now_ns`` is taken to be
    right, and the clock that segments began by is not: it may have been set, and back again. ``begun_ns`` is that of `Removed`:
    what began before it by its clock has no time.
    """
    read_begin = cache(read_begin)
    left = sum(segment.size_bytes for segment in segments)
    oldest_ns = now_ns - int(keep.hours * HOUR_NS)
    if segments and keep.hours > 0:
        begun_ns = find_latest_begin(segments[:1], begun_ns, now_ns=now_ns, read_begin=read_begin)
    for index, segment in enumerate(segments[:-1], start=1):
        if segments[index].first > needed:
            return segment.first
        if not 0 < keep.size_bytes < left:
            if not keep.hours > 0:
                return segment.first
            begun_ns = _find_begin(segments[index:], begun_ns, now_ns, read_begin)
            if begun_ns >= oldest_ns:
                return segment.first
        left -= segment.size_bytes
    return segments[-1].first if segments else 1


def _find_begin(segments: Sequence[Segment], earliest_ns: int, now_ns: int, read_begin: Callable[[Segment], int]) -> int:
    """By when the first of them had begun: the first time among theirs that can be right, for they began one after another;
    `NO_BEGIN` if none can."""
    return next((begun_ns for begun_ns in map(read_begin, segments) if earliest_ns <= begun_ns <= now_ns), NO_BEGIN)


def find_latest_begin(segments: Sequence[Segment], begun_ns: int, *, now_ns: int, read_begin: Callable[[Segment], int]) -> int:
    """The latest time by which one of them had begun, or ``begun_ns``, of those that can be right; 0 if none can."""
    latest_ns = begun_ns if begun_ns <= now_ns else 0
    for segment in segments:
        if latest_ns <= (time_ns := read_begin(segment)) <= now_ns:
            latest_ns = time_ns
    return latest_ns


def list_kept_segments(folder: Path) -> list[Path]:
    """The segments that count, in order: without those that a removal noted, and may not have reached. Raises `UserError`."""
    below = read_removed(folder).below
    return [segment for segment in list_segments(folder) if parse_first_sequence(segment) >= below]


def read_removed(folder: Path) -> Removed:
    """The part that the archive in ``folder`` says that it no longer holds. Raises `ArchiveDamaged`."""
    with suppress(FileNotFoundError):
        return parse_removed((folder / NOTE).read_bytes(), str(folder / NOTE))
    return Removed()


def parse_removed(content: bytes, where: str) -> Removed:
    """The note that was read from ``where``. Raises `ArchiveDamaged`."""
    try:
        return msgspec.json.decode(content, type=Removed)
    except UNREADABLE as error:
        raise ArchiveDamaged(f"{where} cannot be read: restore it from a copy") from error


def describe_segments(folder: Path) -> list[Segment]:
    """The segments that count. The newest is left out while no entry in it is whole: a crash would take it away again, and the
    one before it has to stay until then."""
    kept = list_kept_segments(folder)
    if kept and read_begin(kept[-1]) == NO_BEGIN:
        kept.pop()
    return [Segment(first=parse_first_sequence(path), size_bytes=path.stat().st_size) for path in kept]


def describe_removal(folder: Path, below: int) -> Removed:
    """The note to be written before the archive begins at ``below``; raises `ArchiveDamaged`, and then nothing may leave."""
    noted = read_removed(folder)
    lineages = [each for each in noted.lineages if each.sequence < below]
    for segment in list_kept_segments(folder):
        if parse_first_sequence(segment) < below:
            lineages += [each for each in _read_whole(segment) if each.sequence < below and _begins_lineage(each)]
    return Removed(below=below, lineages=tuple(lineages[-KEPT_LINEAGES:]))


def _read_whole(segment: Path) -> Iterator[ArchivedEntry]:
    with segment.open("rb") as file:
        try:
            for each in read_entries(file, read_header(file, segment, None)):
                yield ArchivedEntry(each.sequence, each.time_ns, each.subject, each.payload)
        except TornRecord as torn:
            raise ArchiveDamaged(f"{segment} is damaged at byte {torn.offset}: restore it from a copy") from torn


def _begins_lineage(entry: ArchivedEntry) -> bool:
    if entry.subject.split(".", 3)[2] != "train":
        return False
    with suppress(MalformedMessage):
        return isinstance(decode_any(STORED["train"], entry.payload, subject=entry.subject), LineageStarted)
    return False


def remove_segments(folder: Path, below: int, *, begun_ns: int = 0) -> int:
    """Let the archive begin with the segment whose first entry is ``below``; returns how many files went. Repeating it is
    harmless, and finishes what a kill left undone. ``begun_ns`` is for the note."""
    if below > read_removed(folder).below:
        noted = msgspec.structs.replace(describe_removal(folder, below), begun_ns=begun_ns)
        replace_synced(folder / NOTE, msgspec.json.encode(noted))
    begins = read_removed(folder).below
    gone = [segment for segment in list_segments(folder) if parse_first_sequence(segment) < begins]
    for segment in gone:
        segment.unlink(missing_ok=True)
    if gone:
        sync_folder(folder)
    return len(gone)


def read_begin(segment: Path) -> int:
    """The time at which the first entry of a segment was stored, in Unix nanoseconds; `NO_BEGIN` if none is whole."""
    with segment.open("rb") as file:
        return read_first_time(file, segment)


def read_first_time(file: BufferedReader, segment: Path) -> int:
    """The same of a segment's beginning."""
    with suppress(TornRecord, StopIteration):
        return next(read_entries(file, read_header(file, segment, None))).time_ns
    return NO_BEGIN
