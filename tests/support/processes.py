"""Processes that a test started, and waiting for their end."""

from __future__ import annotations

from collections.abc import Callable

import anyio
import psutil
from anyio.abc import ByteReceiveStream
from anyio.streams.buffered import BufferedByteReceiveStream

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
    with anyio.fail_after(40):
        while not condition():  # noqa: ASYNC110
            await anyio.sleep(0.01)


async def wait_for_output(output: ByteReceiveStream | None, words: bytes) -> None:
    """Wait until a process has written ``words``, in however many pieces; all that it wrote until then is used up. Raises
    `anyio.IncompleteRead` if its output ends before."""
    assert output is not None, "the process was started without a pipe"
    with anyio.fail_after(50):
        await BufferedByteReceiveStream(output).receive_until(words, 1 << 20)
