"""Wakes an event loop from another thread; neither side blocks the other."""

from __future__ import annotations

import socket

import anyio


class ThreadWakeup:
    """Notifications are not counted: after `wait` returns, check everything that may have changed."""

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
