"""What one task waits for, again and again: an event that can be cleared, without an event's queue of waiters for each wait."""

from __future__ import annotations

import asyncio

import anyio


class Wakeup:
    """At most one task waits at a time. On asyncio a wait costs a future; elsewhere an `anyio.Event`."""

    __slots__ = ("_loop", "_waiter", "is_set")

    def __init__(self) -> None:
        self.is_set = False
        self._waiter: asyncio.Future[None] | anyio.Event | None = None
        try:
            self._loop: asyncio.AbstractEventLoop | None = asyncio.get_running_loop()
        except RuntimeError:
            self._loop = None

    def set(self) -> None:
        """Wake the task that waits, or the next one that would."""
        self.is_set = True
        waiter = self._waiter
        if isinstance(waiter, anyio.Event):
            waiter.set()
        elif waiter is not None and not waiter.done():
            waiter.set_result(None)

    def clear(self) -> None:
        """Wait anew from now on."""
        self.is_set = False

    async def wait(self) -> None:
        """Return once it is set; at once, without giving up the turn, if it is set already."""
        if self.is_set:
            return
        try:
            if self._loop is not None:
                self._waiter = self._loop.create_future()
                await self._waiter
            else:
                self._waiter = anyio.Event()
                await self._waiter.wait()
        finally:
            self._waiter = None
