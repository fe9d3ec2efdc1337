"""A real HTTP server on a free loopback port, in this event loop, that a test may kill and start again at the same address."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import AsyncIterator, Callable, Generator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import uvicorn
from anyio.abc import TaskGroup

Application = Callable[..., Any]


class _QuietServer(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


class LocalServer:
    """``make`` makes the ASGI application anew at every start: what it knew is gone, as after a crash."""

    def __init__(self, make: Callable[[], Application], group: TaskGroup) -> None:
        self._make = make
        self._group = group
        self._server: _QuietServer | None = None
        self._ended = anyio.Event()
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", self.port))
        self.port = listener.getsockname()[1]
        config = uvicorn.Config(self._make(), log_config=None, timeout_graceful_shutdown=1, ws="none", access_log=False)
        self._server, self._ended = _QuietServer(config), anyio.Event()
        self._group.start_soon(self._serve, self._server, listener)
        while not self._server.started:  # uvicorn has no event for it
            assert not self._ended.is_set(), "the server did not start"
            await anyio.sleep(0.005)

    async def _serve(self, server: _QuietServer, listener: socket.socket) -> None:
        try:
            await server.serve(sockets=[listener])
        finally:
            listener.close()
            self._ended.set()

    async def kill(self) -> None:
        """Every connection is reset, whatever goes on in it, and nobody listens any more."""
        if self._server is None:
            return
        server, self._server = self._server, None
        for each in server.servers:
            each.close()
        for connection in list(server.server_state.connections):
            connection.transport.abort()  # type: ignore[union-attr]
        server.should_exit = True
        with anyio.CancelScope(shield=True):
            await self._ended.wait()


@asynccontextmanager
async def serve_application(make: Callable[[], Application]) -> AsyncIterator[LocalServer]:
    async with anyio.create_task_group() as group:
        server = LocalServer(make, group)
        await server.start()
        try:
            yield server
        finally:
            await server.kill()
