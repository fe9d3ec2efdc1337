"""Disks of a simulation: syncs that fail in the middle of a write, disks that are full for a while, and folders that are away,
come back, or went back in time.

A sync that fails tears the file, unless it was synced before: what follows the last good sync is cut somewhere.
"""

from __future__ import annotations

import errno
import os
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from stat import S_ISREG
from typing import Any, NoReturn

import anyio
import msgspec

from fleetbus_workers.learner.checkpoints import INDEX
from tests.simulation.observer import Observer
from tests.simulation.platform.process import Process

MOST_SYNCS = 6
"""At the latest so many syncs after a disk began to fail, one fails."""

AWAY_SHARE = 10.0
AWAY_SUFFIX = ".away"
"""How many times longer a folder is away than other faults last: some wait for it longer than a learner does."""

FULL_SHARE = 3.0
"""How many times longer a disk is full than other faults last: some try several times."""


class Disks:
    """The file system as the processes of each role see it. A role without an entry in ``failing`` has a sound disk."""

    def __init__(self, draw: random.Random, observer: Observer) -> None:
        self._draw = draw
        self._observer = observer
        self._failing: dict[str, int] = {}
        self._full_until: dict[str, float] = {}
        self._synced: dict[int, int] = {}

    def fail_soon(self, role: str) -> None:
        """One of the next syncs of this role's processes fails, and everything until that process ended."""
        self._failing[role] = self._draw.randrange(MOST_SYNCS)

    def fill(self, role: str, seconds: float) -> None:
        """What this role's processes write for so long has no room: that is found at the next sync."""
        self._full_until[role] = max(anyio.current_time() + seconds, self._full_until.get(role, 0.0))
        self._observer.disturb("fill_disk", role, seconds=seconds)

    def run(self, process: Process, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """Call a function that may write files."""
        with self._tearing_syncs(process):
            return function(*arguments, **options)

    @contextmanager
    def _tearing_syncs(self, process: Process) -> Iterator[None]:
        sync = os.fsync

        def tear_or_sync(descriptor: int) -> None:
            status = os.fstat(descriptor)
            left = self._failing.get(process.role)
            if anyio.current_time() < self._full_until.get(process.role, 0.0):
                self._observer.disturb("disk_full", process.role)
                self._fail(descriptor, errno.ENOSPC)
            if left is None:
                self._synced[status.st_ino] = status.st_size
            elif left:
                self._failing[process.role] = left - 1
                self._synced[status.st_ino] = status.st_size
            else:
                del self._failing[process.role]
                self._observer.disturb("disk_failed", process.name)
                self._fail(descriptor, errno.EIO)

        os.fsync = tear_or_sync  # type: ignore[assignment]
        try:
            yield
        finally:
            os.fsync = sync

    def _fail(self, descriptor: int, error: int) -> NoReturn:
        status = os.fstat(descriptor)
        if S_ISREG(status.st_mode):
            kept = min(self._synced.get(status.st_ino, 0), status.st_size)
            os.truncate(f"/proc/self/fd/{descriptor}", self._draw.randint(kept, status.st_size))
        raise OSError(error, os.strerror(error))


async def take_away(folder: Path, seconds: float) -> set[str]:
    """The folder is not mounted for a while; what is written there meanwhile is hidden afterwards: returns its names."""
    if not folder.is_dir():  # noqa: ASYNC240 - virtual time knows no threads
        return set()
    away = folder.with_name(f"{folder.name}{AWAY_SUFFIX}")
    if away.exists():
        return set()
    hidden: set[str] = set()
    folder.rename(away)  # noqa: ASYNC240
    try:
        await anyio.sleep(seconds)
    finally:
        if folder.is_dir():  # noqa: ASYNC240
            hidden = {path.name for path in folder.iterdir()}  # noqa: ASYNC240
        shutil.rmtree(folder, ignore_errors=True)
        away.rename(folder)
    return hidden


def find_taken_away(path: Path) -> Path:
    """Where a checkpoint of that path is while its folder is not mounted, else the path itself."""
    away = path.parent.with_name(f"{path.parent.name}{AWAY_SUFFIX}") / path.name
    return away if away.exists() and not path.exists() else path


def rewind_checkpoints(folder: Path, count: int) -> list[str]:
    """The folder comes from an older copy: the newest ``count`` checkpoints are not in it. Returns their names."""
    whole = sorted((path.parent for path in folder.glob(f"*/{INDEX}")), key=_read_step)
    for path in whole[-count:]:
        shutil.rmtree(path)
    return [path.name for path in whole[-count:]]


class _Step(msgspec.Struct):
    lineage: str
    step: int


def _read_step(path: Path) -> tuple[int, int]:
    found = msgspec.json.decode((path / INDEX).read_bytes(), type=_Step)
    return int(found.lineage[1:]), found.step
