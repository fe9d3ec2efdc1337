"""Keeps an archive within its limits: copies segments to the store, then removes the oldest from the folder and the store.

Above it is the recorder, which says from which entry on all of it is needed; below are the folder's files and the store. A call
that fails or is killed is made up for by the next one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import msgspec
import structlog

from fleetbus.config.settings import ArchiveSettings
from fleetbus.errors import UserError
from fleetbus.log.archive_format import build_segment_path, parse_first_sequence, replace_synced
from fleetbus.log.archive_retention import (
    NOTE,
    Keep,
    Removed,
    Segment,
    choose_first_kept,
    describe_removal,
    describe_segments,
    find_latest_begin,
    list_kept_segments,
    read_begin,
    read_removed,
    remove_segments,
)
from fleetbus_workers.recorder.archive_store import ArchiveStore

SEGMENT_BYTES = 64 << 20
SEGMENTS_PER_LIMIT = 8
"""A limit is kept to within an eighth of it: whole segments leave."""

SMALLEST_SEGMENT_BYTES = 64 << 10
STORED_SECONDS = 600.0
"""What a folder that is lost had and the store had not is of so many seconds, where there is a store."""

MOST_LEAVING = 32
"""Segments that leave at a time. Each is read first, which takes hours where an archive of years gets a limit."""

TELL_SECONDS = 3600.0
"""A line about a limit that cannot be kept, no more often."""

log = structlog.get_logger()


class SegmentLimits(msgspec.Struct, frozen=True, kw_only=True):
    """The size and age up to which entries go into one segment."""

    size_bytes: int
    seconds: float


def compute_segment_limits(settings: ArchiveSettings, size_bytes: int = SEGMENT_BYTES) -> SegmentLimits:
    """Segments that are small enough for the limits of the archive."""
    limits = [each for each in (settings.keep_bytes, settings.store_keep_bytes) if each]
    hours = [each for each in (settings.keep_hours, settings.store_keep_hours) if each]
    smaller = max(min(limits, default=size_bytes * SEGMENTS_PER_LIMIT) // SEGMENTS_PER_LIMIT, SMALLEST_SEGMENT_BYTES)
    seconds = min(hours, default=float("inf")) * 3600 / SEGMENTS_PER_LIMIT
    return SegmentLimits(
        size_bytes=min(size_bytes, smaller), seconds=min(seconds, STORED_SECONDS if settings.store else float("inf"))
    )


class ArchiveKeeper:
    """One archive's folder and its store. Blocking: call it from a thread, one call at a time."""

    def __init__(self, folder: Path, settings: ArchiveSettings) -> None:
        self._folder = folder
        self._keep = Keep(hours=settings.keep_hours, size_bytes=settings.keep_bytes)
        self._store_keep = Keep(hours=settings.store_keep_hours, size_bytes=settings.store_keep_bytes)
        self._store = ArchiveStore(settings.store) if settings.store else None
        self._tells_at = 0.0

    @property
    def has_work(self) -> bool:
        """False for an archive that is kept for ever where it is."""
        return self._store is not None or self._keep.is_limited

    def begin(self) -> None:
        """Before the archive is opened: finish a removal that a kill cut short; a folder that was lost goes on with the newest
        segment of the store. Raises `UserError` where it cannot be told."""
        if not list_kept_segments(self._folder) and self._store is not None:
            try:
                self._continue_from(self._store)
            except OSError as error:
                raise UserError(
                    f"recorder.store cannot be read, and {self._folder} has nothing to continue with: {error}: correct "
                    "recorder.store or its credentials"
                ) from error
        if self._folder.exists():
            remove_segments(self._folder, read_removed(self._folder).below)

    def keep(self, *, now_ns: int, needed: int, is_end: bool = False) -> None:
        """Copy, then remove, as far as limits say and entries from ``needed`` on stay. At the end of a recorder's work the
        newest segment is copied too. Raises `OSError`."""
        if self._store is not None:
            segments = list_kept_segments(self._folder)
            if not self._store.copy(segments if is_end else segments[:-1], removed=read_removed(self._folder)):
                return
        if self._keep.is_limited:
            self._shorten(now_ns, needed)
        if self._store is not None and self._store_keep.is_limited:
            noted, stored, read = self._store.read_removed(), self._store.describe_segments(), cache(self._store.read_begin)
            wanted = choose_first_kept(
                stored, self._store_keep, now_ns=now_ns, needed=needed, read_begin=read, begun_ns=noted.begun_ns
            )
            below = _limit_leaving(wanted, stored)
            removal = Removed(below=below)
            if below > noted.below:
                begun_ns = _find_begun(stored, below, self._store_keep, noted, now_ns=now_ns, read_begin=read)
                removal = msgspec.structs.replace(describe_removal(self._folder, below), begun_ns=begun_ns)
            if removed := self._store.remove_segments(removal):
                log.info("archive's store shortened", begins=below, segments=removed)

    def _continue_from(self, store: ArchiveStore) -> None:
        sizes = store.list_sizes()
        if not sizes:
            return
        newest = list(sizes)[-1]
        self._folder.mkdir(parents=True, exist_ok=True)
        store.fetch(newest, sizes[newest], self._folder)
        removed = msgspec.structs.replace(store.read_removed(), below=parse_first_sequence(Path(newest)))
        replace_synced(self._folder / NOTE, msgspec.json.encode(removed))
        log.warning("archive's folder is empty; continuing from its store", segment=newest)

    def _shorten(self, now_ns: int, needed: int) -> None:
        noted, segments, read = read_removed(self._folder), describe_segments(self._folder), cache(self._read_begin)
        wanted = choose_first_kept(segments, self._keep, now_ns=now_ns, needed=needed, read_begin=read, begun_ns=noted.begun_ns)
        limited = _limit_leaving(wanted, segments)
        below = self._find_stored(limited)
        begun_ns = _find_begun(segments, below, self._keep, noted, now_ns=now_ns, read_begin=read)
        if removed := remove_segments(self._folder, below, begun_ns=begun_ns):
            log.info("archive shortened", begins=below, segments=removed)
        left = sum(segment.size_bytes for segment in segments if segment.first >= below)
        is_beyond = limited == wanted and 0 < self._keep.size_bytes < left and len(segments) > 1
        if is_beyond and time.monotonic() >= self._tells_at:
            self._tells_at = time.monotonic() + TELL_SECONDS
            log.warning(
                "archive exceeds recorder.keep_bytes; what a learner may need of it stays", size_bytes=left, needed_from=needed
            )

    def _find_stored(self, below: int) -> int:
        """The sequence, at most ``below``, up to which the store gives back what the folder has, or has removed it itself. What
        it does not give back is copied once more."""
        if self._store is None:
            return below
        removed = self._store.read_removed().below
        for segment in list_kept_segments(self._folder):
            first = parse_first_sequence(segment)
            if first >= below:
                break
            if first >= removed and not self._store.holds(segment):
                log.error(
                    "store does not give back what was copied to it; copying it again, and keeping it", segment=segment.name
                )
                self._store.put(segment)
                return first
        return below

    def _read_begin(self, segment: Segment) -> int:
        return read_begin(build_segment_path(self._folder, segment.first))


def _find_begun(
    segments: Sequence[Segment],
    below: int,
    keep: Keep,
    noted: Removed,
    *,
    now_ns: int,
    read_begin: Callable[[Segment], int],
) -> int:
    """The begin that the note keeps of those ``below``: once they are gone, nothing else tells that a segment began by a clock
    that was behind."""
    leaving = [segment for segment in segments if segment.first < below] if keep.hours > 0 else []
    return find_latest_begin(leaving, noted.begun_ns, now_ns=now_ns, read_begin=read_begin)


def _limit_leaving(below: int, segments: Sequence[Segment]) -> int:
    """The begin nearest to ``below`` for which no more than `MOST_LEAVING` of ``segments`` leave."""
    return min([below, *(segment.first for segment in segments[MOST_LEAVING : MOST_LEAVING + 1])])
