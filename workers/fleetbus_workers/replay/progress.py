"""How far a replay has come, for whoever waits for it; shares of a replay tell the process that asked, over one pipe.

A record on the pipe is the share's number, what is done and how much there is: short enough to be written whole or not at all,
and left out when nobody reads.
"""

from __future__ import annotations

import os
import struct
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress

import anyio

from fleetbus.task_groups import open_flat_task_group

TOLD_SECONDS = 0.2
"""How often progress is told."""

UNITS = {"environment": "episodes", "inference": "actions", "learner": "messages"}
"""What is counted, by role."""

_RECORD = struct.Struct("<III")
_READ_RECORDS = 256


class Progress:
    """Counts what is done of what there is; ``total`` is 0 until it is known."""

    def __init__(self) -> None:
        self._parts: dict[int, tuple[int, int]] = {}

    @property
    def done(self) -> int:
        return sum(done for done, _ in self._parts.values())

    @property
    def total(self) -> int:
        return sum(total for _, total in self._parts.values())

    def expect(self, count: int) -> None:
        """So much more is to be done here."""
        done, total = self._parts.get(0, (0, 0))
        self._parts[0] = (done, total + count)

    def advance(self) -> None:
        """One more is done here."""
        done, total = self._parts.get(0, (0, 0))
        self._parts[0] = (done + 1, max(total, done + 1))

    def note(self, part: int, done: int, total: int) -> None:
        """How far another process has come with its part."""
        self._parts[part] = (done, total)


@asynccontextmanager
async def telling(tell: Callable[[], None]) -> AsyncIterator[None]:
    """Tell at the beginning, again and again for the length of the block, and at its end."""

    async def repeat() -> None:
        while True:
            tell()
            await anyio.sleep(TOLD_SECONDS)

    async with open_flat_task_group() as group:
        group.start_soon(repeat)
        yield
        group.cancel_scope.cancel()
    tell()


def telling_parent(pipe: int, part: int, progress: Progress) -> Callable[[], None]:
    """A function that writes a share's progress to the pipe, if it has room."""
    os.set_blocking(pipe, False)

    def tell() -> None:
        with suppress(BlockingIOError, BrokenPipeError):
            os.write(pipe, _RECORD.pack(part, progress.done, progress.total))

    return tell


@contextmanager
def progress_pipe() -> Iterator[tuple[int, int]]:
    """The ends of a pipe to read from and to write to, both closed at the end."""
    ends = os.pipe()
    os.set_blocking(ends[0], False)
    try:
        yield ends
    finally:
        for end in ends:
            os.close(end)


async def follow(pipe: int, progress: Progress) -> None:
    """Note what shares tell, until cancelled."""
    while True:
        await anyio.wait_readable(pipe)
        note_all(pipe, progress)


def note_all(pipe: int, progress: Progress) -> None:
    """Note what shares have told so far."""
    with suppress(BlockingIOError):
        while told := os.read(pipe, _READ_RECORDS * _RECORD.size):
            for record in _RECORD.iter_unpack(told):
                progress.note(*record)
