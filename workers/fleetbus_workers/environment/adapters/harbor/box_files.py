"""Files of a box on this machine, whose content the policy chose: nothing here follows a link that it may have made.

Everything is done while nothing runs in the box, so that what was looked at is what is used. Standard library alone.
"""

import os
import shutil
import stat
from collections.abc import Mapping
from pathlib import Path, PurePosixPath


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
    """Copy folders and regular files over what is there, modes included; links and everything else are left out."""
    target.mkdir(parents=True, exist_ok=True)
    for parent, folders, files in os.walk(source):
        folders[:] = [name for name in folders if not os.path.islink(os.path.join(parent, name))]
        below = target / os.path.relpath(parent, source)
        for name in folders:
            (below / name).mkdir(exist_ok=True)
        for name in files:
            if stat.S_ISREG(os.lstat(os.path.join(parent, name)).st_mode):
                shutil.copy(os.path.join(parent, name), below / name, follow_symlinks=False)


def measure_tree(folder: Path) -> int:
    """Bytes of all files below a folder, as the disk holds them."""
    total = 0
    for parent, _, files in os.walk(folder):
        for name in files:
            try:
                total += os.lstat(os.path.join(parent, name)).st_blocks * 512
            except OSError:
                continue  # gone meanwhile
    return total


def give_tree(folder: Path, user: int) -> None:
    """Make everything below a folder, and the folder, the user's."""
    for parent, folders, files in os.walk(folder):
        for name in (*folders, *files):
            os.lchown(os.path.join(parent, name), user, user)
    os.chown(folder, user, user)


def empty_folder(folder: Path) -> None:
    """Remove what is in a folder, which its owner may have closed."""
    os.chmod(folder, 0o755)
    for entry in list(os.scandir(folder)):
        if entry.is_dir(follow_symlinks=False):
            remove_tree(Path(entry.path))
        else:
            os.unlink(entry.path)


def remove_tree(folder: Path) -> None:
    """Remove a folder, those in it that cannot be entered included; nothing is wrong if it is gone."""
    if not folder.is_dir():
        return
    os.chmod(folder, 0o700)
    for parent, folders, _ in os.walk(folder):
        for name in folders:
            if not os.path.islink(os.path.join(parent, name)):
                os.chmod(os.path.join(parent, name), 0o700)
    shutil.rmtree(folder)


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
