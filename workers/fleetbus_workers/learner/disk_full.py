"""Retries writes while the disk is full, so that trained weights are not lost before space is freed."""

import errno
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anyio
import structlog

from fleetbus.concurrency.runtime import Runtime
from fleetbus.errors import is_disk_full

RETRY_SECONDS = 10.0

_MIN_FREE_BYTES = 1 << 20
"""With less free space than this, a failed write counts as a full disk for every error of the library."""

log = structlog.get_logger()


async def retry_while_disk_full(runtime: Runtime, function: Callable[..., object], *arguments: object) -> Any:
    """Run a blocking function that writes files, again and again while the disk is full. The caller's scope ends it."""
    while True:
        try:
            return await runtime.offload(function, *arguments)
        except OSError as error:
            if not is_disk_full(error):
                raise
            log.error("disk is full; waiting for free space", reason=str(error))
            await anyio.sleep(RETRY_SECONDS)


def is_without_room(folder: Path) -> bool:
    """True if the disk of ``folder``, or of the nearest folder above it that exists, is full; one that is away is not."""
    try:
        place = next((each for each in (folder, *folder.parents) if each.exists()), Path("/"))
        return shutil.disk_usage(place).free < _MIN_FREE_BYTES
    except OSError:
        return False


def tell_full_disk(folders: Iterable[Path]) -> None:
    """Log the first of them whose disk is full, if any is: errors of libraries that wrote there may not name it."""
    for folder in folders:
        if is_without_room(folder):
            log.error(
                "disk is full; free space there and start again: the run goes on from its last checkpoint", folder=str(folder)
            )
            return


@contextmanager
def detect_full_disk(folder: Path) -> Iterator[None]:
    """Errors of writing below ``folder`` become `OSError` when the disk is full; torch.save raises another error."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:  # torch raises RuntimeError and others; all but a full disk go on as they are
        if is_without_room(folder):
            raise OSError(errno.ENOSPC, f"no space left below {folder}: {error}") from error
        raise
