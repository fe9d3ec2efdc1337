"""Folders that are there or the reason why not; files that are whole or not there, also for readers after a crash."""

import os
from pathlib import Path

from fleetbus.errors import UserError


def create_folder(folder: Path) -> None:
    """Create a folder, with those above it, if it is not there. Raises `UserError` if something else is there
    or rights are missing, and `OSError` for what may pass, as a full disk or one that is away."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (PermissionError, FileExistsError, NotADirectoryError) as error:
        raise UserError(f"{folder} cannot be used as a folder ({error.strerror}): correct what is there") from error


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
