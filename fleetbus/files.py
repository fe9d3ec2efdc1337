"""Folders that are there or the reason why not; files that are whole or not there, also for readers after a crash."""

import os
import stat
from contextlib import suppress
from pathlib import Path

from fleetbus.errors import UserError

_GROUP, _OTHERS = 0o070, 0o007


def create_folder(folder: Path) -> None:
    """Create a folder, with those above it, if it is not there. Raises `UserError` if something else is there
    or rights are missing, and `OSError` for what may pass, as a full disk or one that is away."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (PermissionError, FileExistsError, NotADirectoryError) as error:
        raise UserError(f"{folder} cannot be used as a folder ({error.strerror}): correct what is there") from error


def create_private_folder(folder: Path) -> None:
    """As `create_folder`, for its owner alone. One that is there and open to everybody becomes so, too; one that is open to its
    group alone was made so on purpose, and stays."""
    create_folder(folder.parent)
    try:
        folder.mkdir(mode=0o700)
        return
    except FileExistsError:
        create_folder(folder)  # says what is in the way if it is no folder
    except PermissionError as error:
        raise UserError(f"{folder} cannot be used as a folder ({error.strerror}): correct what is there") from error
    mode = folder.stat().st_mode
    if mode & _OTHERS:
        with suppress(PermissionError):  # another user's folder, which is open because that user left it so
            folder.chmod(stat.S_IMODE(mode) & ~(_GROUP | _OTHERS))


def find_cache_folder() -> Path:
    """The folder in which what can be made again is kept between runs: in ``XDG_CACHE_HOME``, or ``~/.cache``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser().absolute() / "fleetbus"


def replace_file(file: Path, content: bytes) -> None:
    """Write a file, in place of the one that is there. Not synced: what a power cut leaves is the system's."""
    temporary = file.with_name(f"{file.name}.{os.getpid()}.part")
    try:
        temporary.write_bytes(content)
        os.replace(temporary, file)
    finally:
        temporary.unlink(missing_ok=True)
