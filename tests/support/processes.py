"""What processes a test started, and when they are gone."""

from __future__ import annotations

from collections.abc import Callable

import anyio
import psutil

SHARED = ("nats-server", "multiprocessing.resource_tracker", "multiprocessing.forkserver")
"""Words in the command lines of processes that serve the whole test session."""


def children() -> list[psutil.Process]:
    """Living processes below this one, but for those that the whole test session shares."""
    return [child for child in psutil.Process().children(recursive=True) if _counts(child)]


def _counts(child: psutil.Process) -> bool:
    try:
        command = " ".join(child.cmdline())
        return child.status() != psutil.STATUS_ZOMBIE and not any(word in command for word in SHARED)
    except psutil.NoSuchProcess:
        return False


async def until(condition: Callable[[], bool]) -> None:
    """Processes of other processes end without an event that could be waited for here."""
    with anyio.fail_after(10):
        while not condition():  # noqa: ASYNC110
            await anyio.sleep(0.01)
