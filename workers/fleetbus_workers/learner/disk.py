"""A full disk is waited out as a full log is: what was trained is not lost while somebody makes room."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anyio
import structlog

from fleetbus.ports import Ports

RETRY_SECONDS = 10.0
FULL = (errno.ENOSPC, errno.EDQUOT)

_NOTHING_BYTES = 1 << 20
"""Less than this is free while a write fails: the disk is full, whatever the library says that wrote."""

log = structlog.get_logger()


async def when_there_is_room(ports: Ports, function: Callable[..., Any], *arguments: Any) -> Any:
    """Run a blocking function that writes files, again and again while the disk is full. The caller's scope ends it."""
    while True:
        try:
            return await ports.offload(function, *arguments)
        except OSError as error:
            if error.errno not in FULL:
                raise
            log.error("training waits: the disk is full, make room", reason=str(error))
            await anyio.sleep(RETRY_SECONDS)


@contextmanager
def telling_when_full(folder: Path) -> Iterator[None]:
    """Errors of writing below ``folder`` become `OSError` when the disk is full; torch.save has no word for it."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        if shutil.disk_usage(folder).free < _NOTHING_BYTES:
            raise OSError(errno.ENOSPC, f"no space left below {folder}: {error}") from error
        raise
