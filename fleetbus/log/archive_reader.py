"""Reading an archive, alone or as one with the log: entries in order of sequence, each once.

The recorder (`fleetbus_workers.recorder`) writes archives; audit and recordings read them. Reading never changes a file, so it
may continue while the recorder writes: what is not whole yet at the end of the newest segment is not there yet.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Collection, Iterator
from contextlib import aclosing, suppress
from pathlib import Path

from fleetbus.bus.base import LogBus, StreamEntry
from fleetbus.concurrency.runtime import run_in_thread
from fleetbus.core.episode.claims import EpisodeEntry, fold_episode
from fleetbus.errors import UserError
from fleetbus.log.archive_format import (
    LOCK,
    ArchiveDamaged,
    TornRecord,
    check_guard,
    is_damage,
    parse_first_sequence,
    read_entries,
    read_guard,
    read_header,
)
from fleetbus.log.archive_retention import ArchiveShortened, list_kept_segments, read_removed
from fleetbus.log.episodes import decode_episode_entry
from fleetbus_schemas import EpisodeFinished, Subjects

ENTRIES_AT_A_TIME, BYTES_AT_A_TIME = 1024, 16 << 20
"""Read per call in a thread; bounds what waits in memory."""


def read_archive(folder: Path, *, run: str | None = None, start: int = 1) -> Iterator[StreamEntry]:
    """The archived entries from sequence ``start`` on; blocking.

    An archive in which nothing stands yet has no entries, and one from which the oldest were removed begins behind them. Raises
    `UserError` when there is no archive or it is of another run, `ArchiveDamaged` when a segment is not whole or the
    newest entries that the log was trimmed of are gone, and `ArchiveShortened` when segments are removed meanwhile.
    """
    guarded = read_guard(folder)  # before the segments are listed: the recorder goes on
    segments = list_kept_segments(folder)
    if not segments and not (folder / LOCK).exists():
        raise UserError(f"{folder} contains no archive: give the folder that `fleetbus recorder --archive` writes to")
    following, last = [parse_first_sequence(segment) for segment in segments[1:]], 0
    for index, segment in enumerate(segments):
        if index < len(following) and following[index] <= start:
            last = following[index] - 1
            continue
        try:
            for entry in _read_segment(segment, run, newest=index == len(following)):
                if entry.sequence <= last:
                    raise ArchiveDamaged(f"{segment} has entry {entry.sequence} after {last}: restore it from a copy")
                last = entry.sequence
                if entry.sequence >= start:
                    yield entry
        except FileNotFoundError:
            if parse_first_sequence(segment) >= (below := read_removed(folder).below):
                raise
            raise ArchiveShortened(f"{folder} was shortened to begin at entry {below} while it was read: repeat this") from None
    check_guard(folder, last, guarded)


def measure_segment(segment: Path) -> tuple[int, int]:
    """The last entry up to which a segment can be read, and how many bytes that takes; blocking."""
    last = whole = 0
    with segment.open("rb") as file, suppress(TornRecord, UserError):
        for entry in read_entries(file, read_header(file, segment, None)):
            last, whole = entry.sequence, file.tell()
    return last, whole


def read_archived_entries(folder: Path, sequences: Collection[int], *, run: str | None = None) -> dict[int, StreamEntry]:
    """Those of the entries at ``sequences`` that the archive holds; blocking. Reads from the lowest to the highest of them.
    Where the recorder has yet to begin, there are none."""
    if not list_kept_segments(folder):
        return {}
    found: dict[int, StreamEntry] = {}
    last = max(sequences, default=0)
    for entry in read_archive(folder, run=run, start=min(sequences, default=1)):
        if entry.sequence > last:
            break
        if entry.sequence in sequences:
            found[entry.sequence] = entry
    return found


def find_archived_result(folder: Path, subjects: Subjects, episode_id: str, *, start: int) -> EpisodeFinished | None:
    """The result of an episode whose request stands at ``start``, if the archive holds it by now; blocking."""
    if not list_kept_segments(folder):
        return None
    subject = subjects.episode(episode_id)
    found = list[tuple[int, EpisodeEntry | None]]()
    for entry in read_archive(folder, run=subjects.run, start=start):
        if entry.subject == subject:
            found.append((entry.sequence, message := decode_episode_entry(entry)))
            if isinstance(message, EpisodeFinished):
                break
    return fold_episode(found).result_of_claim


async def scan_archive_and_log(
    bus: LogBus, subjects: Subjects, folder: Path | None, *, start: int = 1
) -> AsyncIterator[StreamEntry]:
    """Archive and log as one, from ``start`` to the end of the log; without a folder the log alone. Of a log that went back in
    time what the archive holds beyond that is left out: `find_lost_entries` has it."""
    last = start - 1
    if folder is not None:
        lost = await find_first_lost(bus, subjects, folder)
        async with aclosing(scan_archive(folder, run=subjects.run, start=start)) as archived:
            async for entry in archived:
                if lost is not None and entry.sequence >= lost:
                    break
                last = entry.sequence
                yield entry
    async for entry in bus.scan([subjects.log], start=last + 1):
        yield entry


async def find_first_lost(bus: LogBus, subjects: Subjects, folder: Path) -> int | None:
    """The first sequence at which the log is not what is archived, because it went back in time: None if it did not.

    A server that loses its newest entries gives their positions again. Raises `UserError` when even the first entry is another:
    then the archive is that of another log.
    """
    newest = await run_in_thread(_read_newest, folder, subjects.run)
    if newest is None or await bus.next_entry(subjects.log, start=newest.sequence) == newest:
        return None
    last, first = (await bus.log_state()).last_sequence, await bus.next_entry(subjects.log, start=1)
    stored_entries = bus.scan([subjects.log])
    stored = await anext(stored_entries, None)
    begin = first.sequence if first is not None else last + 1
    async with aclosing(scan_archive(folder, run=subjects.run, start=begin)) as archived:
        async for entry in archived:
            if entry.sequence > last:
                return entry.sequence
            while stored is not None and stored.sequence < entry.sequence:
                stored = await anext(stored_entries, None)
            if stored is not None and stored.sequence == entry.sequence and stored != entry:
                if stored.sequence == 1:
                    raise UserError(f"{folder} is the archive of an earlier log of run {subjects.run}: give another --archive")
                return entry.sequence
    return None


async def find_lost_entries(bus: LogBus, subjects: Subjects, folder: Path) -> list[StreamEntry]:
    """Entries that the archive holds and the log had lost before new ones were stored; empty unless it went back in time."""
    lost = await find_first_lost(bus, subjects, folder)
    if lost is None:
        return []
    return [entry async for entry in scan_archive(folder, run=subjects.run, start=lost)]


def _read_newest(folder: Path, run: str) -> StreamEntry | None:
    segments = list_kept_segments(folder)
    newest = None
    for entry in read_archive(folder, run=run, start=parse_first_sequence(segments[-1]) if segments else 1):
        newest = entry
    return newest


async def scan_archive(folder: Path, *, run: str | None = None, start: int = 1) -> AsyncGenerator[StreamEntry]:
    """As `read_archive`, without blocking the event loop."""
    entries = read_archive(folder, run=run, start=start)
    while batch := await run_in_thread(_read_batch, entries):
        for entry in batch:
            yield entry


def _read_batch(entries: Iterator[StreamEntry]) -> list[StreamEntry]:
    batch, size = list[StreamEntry](), 0
    for entry in entries:
        batch.append(entry)
        size += len(entry.payload)
        if len(batch) >= ENTRIES_AT_A_TIME or size >= BYTES_AT_A_TIME:
            break
    return batch


def _read_segment(segment: Path, run: str | None, *, newest: bool) -> Iterator[StreamEntry]:
    with segment.open("rb") as file:
        try:
            yield from read_entries(file, read_header(file, segment, run))
        except TornRecord as torn:
            if not newest or is_damage(segment, torn.offset):
                raise ArchiveDamaged(f"{segment} is damaged at byte {torn.offset}: restore it from a copy") from torn
