"""One `up` per run and machine: a lock that the kernel drops when its holder ends, however that happens."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fleetbus.errors import UserError


@contextmanager
def lock_run(file: Path, run: str) -> Iterator[None]:
    """Hold the lock for the length of the block; raises `UserError` when another process holds it."""
    with file.open("a+") as holder:
        try:
            fcntl.flock(holder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder.seek(0)
            owner = holder.read().strip() or "another process"
            raise UserError(f"run {run} is already being trained (process {owner}): stop it, or choose another --run") from None
        holder.truncate(0)
        holder.write(str(os.getpid()))
        holder.flush()
        yield


def is_held(file: Path) -> bool:
    """True while a process holds the lock, false where there is none. Checking does not block other checkers, and writes
    nothing: the file may be on a read-only mount."""
    if not file.is_file():
        return False
    with file.open("r") as holder:
        try:
            fcntl.flock(holder, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False
