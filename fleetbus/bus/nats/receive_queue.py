"""A queue between the wire and one receiving task: what has arrived is never lost to a cancelled receive.

Filled by plain functions that the wire calls; bounded by its producer (credits, limits). Below it is nothing.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Generic, TypeVar

import anyio
import anyio.lowlevel

T = TypeVar("T")

TURN_ITEMS = 16
"""So many items are taken in one go before the other tasks get their turn; each turn of the loop costs as much as an item."""


class ReceiveQueue(Generic[T]):
    """Items in order of arrival, and at most one task that waits for them."""

    def __init__(self) -> None:
        self.items: deque[T] = deque()
        self.failure: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._taken = 0

    def put(self, item: T) -> None:
        self.items.append(item)
        self.wake()

    def fail(self, failure: Exception) -> None:
        """Let `take` raise once what has arrived is taken."""
        self.failure = failure
        self.wake()

    def wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def take(self) -> T:
        """The next item; waits without limit. An item leaves the queue only when it is returned. Within a cancelled scope up to
        `TURN_ITEMS` that have arrived may still be taken: to look for a cancellation costs as much as an item."""
        self._taken += 1
        if self._taken % TURN_ITEMS == 0:
            await anyio.lowlevel.checkpoint()
        while not self.items:
            await self.wait()
        return self.items.popleft()

    async def wait(self) -> None:
        """Wait for an item or a `wake`; raises the failure if there is one."""
        if self.failure is not None:
            raise self.failure
        self._waiter = asyncio.get_running_loop().create_future()
        await self._waiter
