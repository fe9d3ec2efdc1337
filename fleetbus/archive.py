"""Reading an archive, alone or as one with the log: entries in order of sequence, each once.

The recorder (`fleetbus_workers.recorder`) writes archives; audit and recordings read them. Reading never changes a file, so it
may continue while the recorder writes: what is not whole yet at the end of the newest segment is not there yet.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Iterator
from itertools import islice
from pathlib import Path

from fleetbus.archive_format import ArchiveDamaged, TornRecord, list_segments, parse_first_sequence, read_entries, read_header
from fleetbus.bus.base import Bus, StreamEntry
from fleetbus.episodes import decode_episode_entry
from fleetbus.errors import UserError
from fleetbus.runtime import run_in_thread
from fleetbus_schemas import EpisodeFinished, Subjects

ENTRIES_AT_A_TIME = 1024
"""Read per call in a thread; bounds what waits in memory."""


def read_archive(folder: Path, *, run: str | None = None, start: int = 1) -> Iterator[StreamEntry]:
    """The archived entries from sequence ``start`` on; blocking.

    Raises `UserError` when there is no archive or it is of another run, `ArchiveDamaged` when a segment is not whole.
    """
    segments = list_segments(folder)
    if not segments:
        raise UserError(f"{folder} contains no archive: give the folder that `fleetbus recorder --archive` writes to")
    following = [parse_first_sequence(segment) for segment in segments[1:]]
    for index, segment in enumerate(segments):
        if index < len(following) and following[index] <= start:
            continue
        for entry in _read_segment(segment, run, newest=index == len(following)):
            if entry.sequence >= start:
                yield entry


def read_archived_entries(folder: Path, sequences: Collection[int], *, run: str | None = None) -> dict[int, StreamEntry]:
    """Those of the entries at ``sequences`` that the archive holds; blocking. Reads from the lowest to the highest of them."""
    found: dict[int, StreamEntry] = {}
    last = max(sequences, default=0)
    for entry in read_archive(folder, run=run, start=min(sequences, default=1)):
        if entry.sequence > last:
            break
        if entry.sequence in sequences:
            found[entry.sequence] = entry
    return found


def find_archived_result(folder: Path, subjects: Subjects, episode_id: str, *, start: int) -> EpisodeFinished | None:
    """The result of an episode whose request stands at ``start``, if the archive holds it; blocking."""
    subject = subjects.episode(episode_id)
    for entry in read_archive(folder, run=subjects.run, start=start):
        if entry.subject == subject and isinstance(message := decode_episode_entry(entry), EpisodeFinished):
            return message
    return None


async def scan_archive_and_log(bus: Bus, subjects: Subjects, folder: Path | None) -> AsyncIterator[StreamEntry]:
    """Archive and log as one, to the end of the log; without a folder the log alone."""
    last = 0
    if folder is not None:
        async for entry in scan_archive(folder, run=subjects.run):
            last = entry.sequence
            yield entry
        if last > await bus.last_sequence():
            raise UserError(f"{folder} is longer than the log: it belongs to another run with the name {subjects.run}")
    async for entry in bus.scan([subjects.log], start=last + 1):
        yield entry


async def scan_archive(folder: Path, *, run: str | None = None) -> AsyncIterator[StreamEntry]:
    """As `read_archive`, without blocking the event loop."""
    entries = read_archive(folder, run=run)
    while batch := await run_in_thread(_read_batch, entries):
        for entry in batch:
            yield entry


def _read_batch(entries: Iterator[StreamEntry]) -> list[StreamEntry]:
    return list(islice(entries, ENTRIES_AT_A_TIME))


def _read_segment(segment: Path, run: str | None, *, newest: bool) -> Iterator[StreamEntry]:
    with segment.open("rb") as file:
        try:
            read_header(file, segment, run)
            yield from read_entries(file)
        except TornRecord as torn:
            if not newest:
                raise ArchiveDamaged(f"{segment} is damaged at byte {torn.offset}: restore it from a copy") from torn
