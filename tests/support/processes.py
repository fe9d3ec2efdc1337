"""What processes a test started, and when they are gone."""

from __future__ import annotations

from collections.abc import Callable

import anyio
import psutil


def children() -> list[psutil.Process]:
    """Living processes below this one, but for the nats-server that the whole test session shares."""
    return [child for child in psutil.Process().children(recursive=True) if _counts(child)]


def _counts(child: psutil.Process) -> bool:
    try:
        return child.status() != psutil.STATUS_ZOMBIE and child.name() != "nats-server"
    except psutil.NoSuchProcess:
        return False


async def until(condition: Callable[[], bool]) -> None:
    """Processes of other processes end without an event that could be waited for here."""
    with anyio.fail_after(10):
        while not condition():  # noqa: ASYNC110
            await anyio.sleep(0.01)
