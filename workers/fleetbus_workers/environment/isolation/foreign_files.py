"""Files on this machine whose content the policy chose, a box's or an agent's: nothing here follows a link of theirs.

Everything but measuring is done while nothing runs in the box, so that what was looked at is what is used.
"""

import errno
import os
import secrets
import shutil
import stat
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath

import structlog

from fleetbus_workers.environment.ownership import is_abandoned

ENTRY_BYTES = 512
"""What an entry counts for at least: an empty file, or a folder of a file system that stores small ones with their names."""

MAX_DEPTH = 256
"""Folders in each other of a tree that is measured or copied: what removes a copy may be recursive."""

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC

log = structlog.get_logger(__name__)


class TreeTooDeep(Exception):
    """More than `MAX_DEPTH` folders lie in each other, or so many that no path reaches the last."""


def find_outside(mounts: Mapping[str, Path], path: str) -> Path | None:
    """The place of a path of the box on this machine; None if it is in none of its folders, or leads over a link."""
    pure = PurePosixPath(path)
    if ".." in pure.parts:
        return None
    for inside, outside in sorted(mounts.items(), key=lambda mount: -len(mount[0])):
        if pure.is_relative_to(inside):
            found = outside
            for part in pure.relative_to(inside).parts:
                found = found / part
                if found.is_symlink():
                    return None
            return found
    return None


def copy_tree(source: Path, target: Path) -> None:
    """Copy folders and regular files over what is there, modes included; links and everything else are left out.

    Raises `TreeTooDeep`.
    """
    target.mkdir(parents=True, exist_ok=True)
    with _refusing_long_paths():
        for parent, folders, files in walk_tree(source):
            below = target / os.path.relpath(parent, source)
            for name in folders:
                (below / name).mkdir(exist_ok=True)
            for name in files:
                if stat.S_ISREG(os.lstat(os.path.join(parent, name)).st_mode):
                    shutil.copy(os.path.join(parent, name), below / name, follow_symlinks=False)


def measure_tree(folder: Path) -> int:
    """Bytes of all files and folders below a folder, as the disk holds them. Raises `TreeTooDeep`."""
    total = 0
    with _refusing_long_paths():
        for parent, folders, files in walk_tree(folder):
            for name in (*folders, *files):
                try:
                    state = os.lstat(os.path.join(parent, name))
                except FileNotFoundError:
                    continue  # removed meanwhile
                total += max(state.st_blocks * 512, ENTRY_BYTES)
    return total


def walk_tree(folder: Path) -> Iterator[tuple[str, list[str], list[str]]]:
    """Like `os.walk`, which is recursive before Python 3.12 and passes over what paths do not reach; links count as files.

    Folders that were removed meanwhile, or that only their owner may enter, are left out. Raises `TreeTooDeep`.
    """
    waiting = [(os.fspath(folder), 0)]
    while waiting:
        parent, depth = waiting.pop()
        if depth > MAX_DEPTH:
            raise TreeTooDeep(f"more than {MAX_DEPTH} folders lie in each other")
        folders: list[str] = []
        files: list[str] = []
        try:
            with os.scandir(parent) as entries:
                for entry in entries:
                    (folders if entry.is_dir(follow_symlinks=False) else files).append(entry.name)
        except (FileNotFoundError, PermissionError, NotADirectoryError):
            continue
        yield parent, folders, files
        waiting += ((os.path.join(parent, name), depth + 1) for name in folders)


@contextmanager
def _refusing_long_paths() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            raise TreeTooDeep("folders lie in each other more deeply than a path can say") from error
        raise


def give_tree(folder: Path, user: int) -> None:
    """Make everything below a folder, and the folder, the user's. Raises `TreeTooDeep`."""
    for parent, folders, files in walk_tree(folder):
        for name in (*folders, *files):
            os.lchown(os.path.join(parent, name), user, user)
    os.chown(folder, user, user)


def empty_folder(folder: Path) -> None:
    """Remove what is in a folder, which its owner may have closed, however deep it is."""
    os.chmod(folder, 0o755)
    top = os.open(folder, _FOLDER)
    try:
        _empty(top)
    finally:
        os.close(top)


def remove_tree(folder: Path) -> None:
    """Remove a folder, those in it that cannot be entered included, however deep it is; nothing is wrong if it is gone."""
    if not folder.is_dir():
        return
    os.chmod(folder, 0o700)
    empty_folder(folder)
    os.rmdir(folder)


def _empty(top: int) -> None:
    """Remove what is in an open folder: each folder below is moved up into it before it is emptied, so that neither paths nor
    calls nor descriptors grow with the depth."""
    prefix, moved, waiting = f".removed-{secrets.token_hex(8)}-", 0, []

    def clear(descriptor: int) -> None:
        nonlocal moved
        with os.scandir(descriptor) as entries:
            found = [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries]
        for name, is_folder in found:
            with suppress(FileNotFoundError):  # another worker sweeps as well
                if not is_folder:
                    os.unlink(name, dir_fd=descriptor)
                    continue
                moved += 1
                os.chmod(name, 0o700, dir_fd=descriptor)
                os.rename(name, f"{prefix}{moved}", src_dir_fd=descriptor, dst_dir_fd=top)
                waiting.append(f"{prefix}{moved}")

    clear(top)
    while waiting:
        name = waiting.pop()
        with suppress(FileNotFoundError):
            descriptor = os.open(name, _FOLDER, dir_fd=top)
            try:
                clear(descriptor)
            finally:
                os.close(descriptor)
            os.rmdir(name, dir_fd=top)


def sweep_folders(prefix: str) -> list[str]:
    """Remove temporary folders of workers of this machine that have exited: their names are ``prefix``, an owner
    (`build_process_owner`), a dash and anything. One that cannot be removed is reported and left."""
    removed = []
    for folder in Path(tempfile.gettempdir()).glob(f"{prefix}*_*_*-*"):
        owner = folder.name.removeprefix(prefix).rpartition("-")[0]
        if not folder.is_dir() or folder.is_symlink() or not is_abandoned(owner, ""):
            continue
        try:
            remove_tree(folder)
        except OSError as error:
            log.warning("folder of an earlier worker cannot be removed; leaving it", folder=folder.name, reason=str(error))
        else:
            removed.append(folder.name)
    return removed


def read_regular_file(path: Path, limit: int) -> bytes | None:
    """At most ``limit`` + 1 bytes of a regular file; None for what is none."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        return None
    with os.fdopen(descriptor, "rb") as file:
        return file.read(limit + 1)
