"""The connection of one client to the in-memory server, as far as it can be up or down."""

from __future__ import annotations

from collections.abc import Callable

import anyio

from fleetbus.bus.base import StreamEntry


class MemoryConnection:
    """Up while the server lives and the client is connected. ``breaks`` counts how often it went down."""

    def __init__(self, server_up: bool) -> None:
        self.breaks = 0
        self.on_up: dict[object, Callable[[], None]] = {}
        self.lost: StreamEntry | None = None
        """An entry that this client stored, and whose position was given to another one."""

        self._server_up = server_up
        self._connected = True
        self._up = anyio.Event()
        if server_up:
            self._up.set()

    @property
    def up(self) -> bool:
        return self._server_up and self._connected

    def change(self, *, server_up: bool | None = None, connected: bool | None = None) -> None:
        """Update the state and wake waiters."""
        before = self.up
        self._server_up = self._server_up if server_up is None else server_up
        self._connected = self._connected if connected is None else connected
        if before and not self.up:
            self.breaks += 1
            self._up = anyio.Event()
        elif self.up and not before:
            self._up.set()
            for hear in list(self.on_up.values()):
                hear()

    async def wait(self, timeout: float) -> bool:
        """True as soon as the link is up, False after ``timeout`` seconds."""
        if not self.up:
            with anyio.move_on_after(timeout):
                await self._up.wait()
        return self.up

    async def wait_for_break_to_end(self, breaks: int, timeout: float) -> None:
        """Wait ``timeout`` seconds, or until the link is up again after a break since ``breaks`` was read."""
        with anyio.move_on_after(timeout):
            if self.breaks != breaks:
                await self._up.wait()
            else:
                changed = anyio.Event()
                self.on_up[changed] = changed.set
                try:
                    await changed.wait()
                finally:
                    del self.on_up[changed]
