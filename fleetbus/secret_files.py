"""Files with secrets: there with their content and their rights at once, or not at all."""

import errno
import fcntl
import os
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fleetbus.errors import UserError

LOCK_SECONDS = 10.0
_LOCK_PAUSE_SECONDS = 0.05

_NO_HARD_LINKS = frozenset({errno.EPERM, errno.EMLINK, errno.ENOSYS, errno.EOPNOTSUPP})
"""Said by file systems that have none, as those of USB sticks and some network shares."""


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Change a folder alone: two that change one file by what they read of it lose the change of one. Raises `UserError` if
    another one has not ended after ten seconds, and for what the disk refuses in the block; who dies leaves no lock."""
    try:
        with _lock(folder):
            yield
    except OSError as error:
        raise UserError(f"cannot write {error.filename or folder}: {error.strerror}") from error


@contextmanager
def _lock(folder: Path) -> Iterator[None]:
    descriptor, give_up_at = os.open(folder, os.O_RDONLY), time.monotonic() + LOCK_SECONDS
    try:
        while not _try_lock(descriptor, folder):
            if time.monotonic() >= give_up_at:
                raise UserError(f"another fleetbus auth changes {folder}: call this again when it has ended")
            time.sleep(_LOCK_PAUSE_SECONDS)
        yield
    finally:
        os.close(descriptor)


def _try_lock(descriptor: int, folder: Path) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        raise UserError(f"{folder} cannot be locked ({error.strerror}): keep it on another file system") from error
    return True


def create_secret_file(file: Path, content: bytes, *, readable: bool = False) -> bool:
    """Write a file that is not there; False if it is. Whoever is cut off leaves no part of it under its name. Without hard
    links only the folder's lock keeps a file that somebody else writes meanwhile."""
    if os.path.lexists(file):
        return False
    temporary = _write_beside(file, content, readable=readable)
    try:
        os.link(temporary, file)
    except FileExistsError:
        return False
    except OSError as error:
        if error.errno not in _NO_HARD_LINKS:
            raise
        os.replace(temporary, file)
    finally:
        temporary.unlink(missing_ok=True)
    return True


def replace_secret_file(file: Path, content: bytes, *, readable: bool = False) -> None:
    """Write a file anew; whoever reads it meanwhile reads one or the other."""
    temporary = _write_beside(file, content, readable=readable)
    try:
        os.replace(temporary, file)
    finally:
        temporary.unlink(missing_ok=True)


def _write_beside(file: Path, content: bytes, *, readable: bool) -> Path:
    """A file of another name in the same folder, on the disk, whose rights it has from the beginning."""
    temporary = file.with_name(f"{file.name}.{secrets.token_hex(4)}.part")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644 if readable else 0o600)
    try:
        with os.fdopen(descriptor, "wb") as opened:
            opened.write(content)
            opened.flush()
            os.fsync(descriptor)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    return temporary
