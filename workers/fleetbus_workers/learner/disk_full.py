"""Retries writes while the disk is full, so that trained weights are not lost before space is freed."""

import errno
import shutil
from collections.abc import Callable, Iterator
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


@contextmanager
def detect_full_disk(folder: Path) -> Iterator[None]:
    """Errors of writing below ``folder`` become `OSError` when the disk is full; torch.save raises another error."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:  # torch raises RuntimeError and others; all but a full disk go on as they are
        if shutil.disk_usage(folder).free < _MIN_FREE_BYTES:
            raise OSError(errno.ENOSPC, f"no space left below {folder}: {error}") from error
        raise
