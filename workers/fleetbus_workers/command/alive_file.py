"""Tells a container's probe that a role's event loop turns: the time of a file. Roles open no port that could be asked.

It says nothing of the bus: a worker waits for a server that is away for as long as that takes, and must not be started again
meanwhile (docs/decisions/0231-a-probe-reads-the-time-of-a-file.md). Above it is the process of a role; it must never wait for
anything but its own pauses.
"""

from __future__ import annotations

from pathlib import Path

import anyio
import structlog

from fleetbus.errors import UserError

TOUCH_SECONDS = 10.0

log = structlog.get_logger()


async def touch_regularly(path: Path) -> None:
    """Until cancelled. Raises `UserError` if the file cannot be made; what fails later is logged once and tried again."""
    if problem := _touch(path):
        raise UserError(f"cannot write log.alive, {path}: {problem}")
    before = ""
    while True:
        await anyio.sleep(TOUCH_SECONDS)
        problem = _touch(path)
        if problem and not before:
            log.warning("alive file cannot be touched; trying again", file=str(path), reason=problem)
        before = problem


def _touch(path: Path) -> str:
    """The reason if it failed, else empty."""
    try:
        path.touch()
    except OSError as error:
        return str(error.strerror)
    return ""
