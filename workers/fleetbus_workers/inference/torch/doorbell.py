"""A bell that a thread rings and an event loop hears, without either waiting for the other."""

from __future__ import annotations

import socket

import anyio


class Doorbell:
    """Rings are not counted: after `heard` returns, look at everything that might have changed."""

    def __init__(self) -> None:
        self._hears, self._rings = socket.socketpair()
        self._hears.setblocking(False)
        self._rings.setblocking(False)

    def ring(self) -> None:
        """From any thread; never blocks: a full socket is a bell that is ringing already."""
        try:
            self._rings.send(b"\0")
        except BlockingIOError:
            pass

    async def heard(self) -> None:
        """Wait for a ring since the last call. From one task only."""
        await anyio.wait_readable(self._hears)
        self._hears.recv(4096)

    def close(self) -> None:
        self._hears.close()
        self._rings.close()
