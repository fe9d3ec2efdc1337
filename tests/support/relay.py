"""A TCP relay to a nats-server: a client's network, to be listened to, slowed down, held up, cut and mended."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager

import anyio
import anyio.abc


class Relay:
    """Clients connect to ``url``. ``heard`` is what they sent; while ``reading`` is not set, nothing more is read of them. All
    bytes arrive ``one_way_seconds`` later, in either direction."""

    def __init__(self, upstream: str, *, one_way_seconds: float = 0.0, host: str = "127.0.0.1") -> None:
        self._upstream_port = int(upstream.rpartition(":")[2])
        self._one_way_seconds = one_way_seconds
        self._host = host
        self._down = False
        self._answering = set_event()
        self._scopes: dict[anyio.CancelScope, None] = {}
        self.heard = bytearray()
        self.reading = set_event()
        self.url = ""

    async def cut(self) -> None:
        """End every connection and refuse new ones."""
        self._down = True
        for scope in list(self._scopes):
            scope.cancel()

    async def mend(self) -> None:
        self._answering = set_event()
        self._down = False

    async def hold_answers(self) -> None:
        """What clients send still arrives; nothing comes back until the relay is cut and mended."""
        self._answering = anyio.Event()

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[Relay]:
        async with (
            await anyio.create_tcp_listener(local_host=self._host) as listener,
            anyio.create_task_group() as tasks,
        ):
            self.url = f"nats://{self._host}:{listener.extra(anyio.abc.SocketAttribute.local_port)}"
            tasks.start_soon(listener.serve, self._serve)
            yield self
            tasks.cancel_scope.cancel()

    async def _serve(self, client: anyio.abc.SocketStream) -> None:
        async with client:
            if self._down:
                return
            with anyio.CancelScope() as scope:
                self._scopes[scope] = None
                try:
                    await self._join(client, scope)
                except OSError:
                    return  # the server is down
                finally:
                    del self._scopes[scope]

    async def _join(self, client: anyio.abc.SocketStream, scope: anyio.CancelScope) -> None:
        async with (
            await anyio.connect_tcp("127.0.0.1", self._upstream_port) as server,
            anyio.create_task_group() as tasks,
        ):
            tasks.start_soon(self._pump, client, server, self._listened, scope)
            tasks.start_soon(self._pump, server, client, self._answered, scope)

    async def _listened(self, chunk: bytes) -> None:
        await self.reading.wait()
        self.heard += chunk

    async def _answered(self, chunk: bytes) -> None:
        await self._answering.wait()

    async def _pump(
        self,
        source: anyio.abc.SocketStream,
        target: anyio.abc.SocketStream,
        passing: Callable[[bytes], Awaitable[None]],
        scope: anyio.CancelScope,
    ) -> None:
        try:
            if self._one_way_seconds:
                await self._pump_late(source, target, passing)
            else:
                async for chunk in source:
                    await passing(chunk)
                    await target.send(chunk)
        except* (anyio.BrokenResourceError, anyio.ClosedResourceError):
            pass  # the other side is gone, and so is this connection
        finally:
            scope.cancel()

    async def _pump_late(
        self, source: anyio.abc.SocketStream, target: anyio.abc.SocketStream, passing: Callable[[bytes], Awaitable[None]]
    ) -> None:
        held, arrived = deque[tuple[float, bytes]](), anyio.Event()

        async def deliver() -> None:
            nonlocal arrived
            while True:
                while held:
                    due, chunk = held.popleft()
                    await anyio.sleep_until(due)
                    await target.send(chunk)
                arrived = anyio.Event()
                await arrived.wait()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(deliver)
            async for chunk in source:
                await passing(chunk)
                held.append((anyio.current_time() + self._one_way_seconds, chunk))
                arrived.set()
            tasks.cancel_scope.cancel()


def set_event() -> anyio.Event:
    event = anyio.Event()
    event.set()
    return event
