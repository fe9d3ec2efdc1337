"""The progress of a replay, added up over the processes that share it."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import anyio

from fleetbus.concurrency.task_groups import open_flat_task_group

REPORT_SECONDS = 0.2
"""How often progress is reported."""


class Progress:
    """Counts what is done of what there is; ``total`` is 0 until it is known. This process counts as part 0."""

    def __init__(self) -> None:
        self._parts: dict[int, tuple[int, int]] = {}

    @property
    def done(self) -> int:
        return sum(done for done, _ in self._parts.values())

    @property
    def total(self) -> int:
        return sum(total for _, total in self._parts.values())

    def expect(self, count: int) -> None:
        """So much more is to be done by this process."""
        done, total = self._parts.get(0, (0, 0))
        self._parts[0] = (done, total + count)

    def advance(self) -> None:
        """One more is done by this process."""
        done, total = self._parts.get(0, (0, 0))
        self._parts[0] = (done + 1, max(total, done + 1))

    def note(self, part: int, done: int, total: int) -> None:
        """Note the progress of another process with its part."""
        self._parts[part] = (done, total)


@asynccontextmanager
async def report_regularly(report: Callable[[], Awaitable[None]]) -> AsyncIterator[None]:
    """Report at the beginning, regularly for the length of the block, and at its end."""

    async def repeat() -> None:
        while True:
            await report()
            await anyio.sleep(REPORT_SECONDS)

    async with open_flat_task_group() as group:
        group.start_soon(repeat)
        yield
        group.cancel_scope.cancel()
    await report()
