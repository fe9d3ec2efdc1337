"""An archive from where it lies: its folder, the recorder's store, or both together as one folder of links. Blocking.

Readers know folders only. What a store has is copied here first, whole; a segment that several have is taken from where it can
be read further.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec

from fleetbus.errors import UserError
from fleetbus.log.archive_format import GUARD_FILE, LOCK, Guard, read_guard, replace_synced
from fleetbus.log.archive_reader import measure_segment
from fleetbus.log.archive_retention import NOTE, list_kept_segments, read_removed
from fleetbus_workers.recorder.archive_store import ArchiveStore

FETCHED = "fetched"
"""Folder for what comes from a store until it is known to be better than what is there."""


@contextmanager
def open_archive_places(places: Sequence[str]) -> Iterator[Path]:
    """One folder with all that is in these, for the length of the block: the folder itself where only one is given. Raises
    `UserError` for a folder that is not there, and for a store that cannot be read."""
    folders = [Path(place) for place in places if "://" not in place]
    for folder in folders:
        if not folder.is_dir():
            raise UserError(f"{folder} is no folder: give the one that `fleetbus recorder --archive` writes to")
    if len(places) == 1 and folders:
        yield folders[0]
        return
    with tempfile.TemporaryDirectory(prefix="fleetbus-archive-") as name:
        try:
            _collect(Path(name), folders, [ArchiveStore(place) for place in places if "://" in place])
        except OSError as error:
            raise UserError(f"the archive cannot be read: {error}: correct --archive, or the store's credentials") from error
        yield Path(name)


def _collect(target: Path, folders: Sequence[Path], stores: Sequence[ArchiveStore]) -> None:
    """Noted as removed is what none of them has any more by its own word; another gap is a loss."""
    (target / LOCK).touch()
    for folder in folders:
        for segment in list_kept_segments(folder):
            taken = target / segment.name
            if not taken.exists() or measure_segment(segment) > measure_segment(taken):
                taken.unlink(missing_ok=True)
                taken.symlink_to(segment.absolute())
    (target / FETCHED).mkdir()
    for store in stores:
        for name, size in store.list_sizes().items():
            found = measure_segment(target / name) if (target / name).exists() else (0, -1)
            if size > found[1]:
                store.fetch(name, size, target / FETCHED)
                if found[1] < 0 or measure_segment(target / FETCHED / name) > found:
                    (target / FETCHED / name).replace(target / name)
    guarded = max((read_guard(folder) for folder in folders), default=0)
    replace_synced(target / GUARD_FILE, msgspec.json.encode(Guard(trimmed=guarded)))
    removed = [read_removed(folder) for folder in folders] + [store.read_removed() for store in stores]
    replace_synced(target / NOTE, msgspec.json.encode(min(removed, key=lambda each: each.below)))
