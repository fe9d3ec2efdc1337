"""A signal that one task waits for again and again, set by the same loop or by another thread."""

import asyncio
import socket
from collections.abc import Awaitable, Generator

import anyio


class _Nothing:
    """An awaitable for where there is nothing to wait for."""

    def __await__(self) -> Generator[None]:
        return
        yield


_NOTHING = _Nothing()


class Wakeup:
    """An event that can be cleared; at most one task waits at a time. On asyncio a wait costs a future, elsewhere an event."""

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

    def wait(self) -> Awaitable[None]:
        """To be awaited at once: until it is set, or without giving up the turn if it is set already. No coroutine of its own:
        tens of thousands may wait."""
        if self.is_set:
            return _NOTHING
        if self._loop is not None:
            self._waiter = self._loop.create_future()
            return self._waiter
        self._waiter = anyio.Event()
        return self._waiter.wait()


class ThreadWakeup:
    """Wakes an event loop from another thread; neither side blocks the other. Notifications are not counted: after `wait`
    returns, check everything that may have changed."""

    def __init__(self) -> None:
        self._receiver, self._sender = socket.socketpair()
        self._receiver.setblocking(False)
        self._sender.setblocking(False)

    def notify(self) -> None:
        """From any thread; never blocks: a full socket means that a notification is already pending."""
        try:
            self._sender.send(b"\0")
        except BlockingIOError:
            pass

    async def wait(self) -> None:
        """Wait for a notification since the last call. From one task only."""
        await anyio.wait_readable(self._receiver)
        self._receiver.recv(4096)

    def close(self) -> None:
        self._receiver.close()
        self._sender.close()
