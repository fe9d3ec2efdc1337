"""What the bus contract is tested with: the same interface over the in-memory server and over a real nats-server.

A `Line` is one client's connection that a test may cut or whose answers it may hold back; for NATS it is a TCP relay.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator, Generator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from typing import Any, Protocol

import anyio
import anyio.abc
import pytest
import trio.testing
from anyio.from_thread import BlockingPortal, start_blocking_portal

from fleetbus.bus.base import Bus
from fleetbus.bus.memory import Faults, MemoryServer
from fleetbus.bus.memory_bus import MemoryBus
from fleetbus.bus.memory_faults import NO_PUBLISH_FAULT, PublishFault
from fleetbus.bus.nats import connect
from fleetbus.bus.nats.server import NatsServerProcess, run_server
from fleetbus.bus.streams import ConsumerPlan, RunPlan, StreamPlan, lane_stream, log_stream
from schemas import Subjects

LEASE_SECONDS = 1.0
"""``ack_wait`` of the consumer ``short``; ``long`` has a minute."""


class Line(Protocol):
    """One client's connection as a test can spoil it."""

    async def cut(self) -> None: ...
    async def mend(self) -> None: ...
    async def hold_answers(self) -> None:
        """What the client sends still arrives; nothing comes back until the line is cut and mended."""


class World:
    """One run on one kind of bus."""

    def __init__(self) -> None:
        self.run = f"t{secrets.token_hex(6)}"
        self.subjects = Subjects(self.run)

    def plan(self, *, max_bytes: int = 0, duplicate_window_seconds: float = 60.0) -> RunPlan:
        consumers = [
            ConsumerPlan(name=name, filter=self.subjects.tasks(name), ack_wait_seconds=seconds)
            for name, seconds in (("short", LEASE_SECONDS), ("long", 60.0))
        ]
        return RunPlan(
            run=self.run,
            log=StreamPlan(
                name=log_stream(self.run),
                subjects=(self.subjects.log,),
                max_bytes=max_bytes,
                duplicate_window_seconds=duplicate_window_seconds,
            ),
            lanes=StreamPlan(name=lane_stream(self.run), subjects=(self.subjects.lanes,), max_per_subject=1),
            consumers=tuple(consumers),
        )

    @asynccontextmanager
    async def ready(self, **changes: Any) -> AsyncGenerator[Bus]:
        """A bus with the run declared."""
        async with self.connect() as bus:
            await bus.declare(self.plan(**changes))
            yield bus

    def connect(self) -> AbstractAsyncContextManager[Bus]:
        raise NotImplementedError

    def connect_by_line(self) -> AbstractAsyncContextManager[tuple[Bus, Line]]:
        raise NotImplementedError

    async def kill_server(self) -> None:
        raise NotImplementedError

    async def restart_server(self) -> None:
        raise NotImplementedError

    async def purge(self, below: int) -> None:
        """What an archive does: remove the entries below this sequence."""
        raise NotImplementedError


class _HeldAnswers(Faults):
    def __init__(self) -> None:
        self.held: set[str] = set()

    def publishing(self, worker: str, subject: str) -> PublishFault:
        return PublishFault(lost="answer") if worker in self.held else NO_PUBLISH_FAULT


class _MemoryLine:
    def __init__(self, bus: MemoryBus, faults: _HeldAnswers) -> None:
        self._bus = bus
        self._faults = faults

    async def cut(self) -> None:
        self._bus.disconnect()
        self._faults.held.clear()

    async def mend(self) -> None:
        self._bus.reconnect()

    async def hold_answers(self) -> None:
        self._faults.held.add("on a line")


class MemoryWorld(World):
    def __init__(self) -> None:
        super().__init__()
        self._faults = _HeldAnswers()
        self._server = MemoryServer(faults=self._faults)

    def connect(self) -> AbstractAsyncContextManager[Bus]:
        return self._server.connect(self.run)

    @asynccontextmanager
    async def connect_by_line(self) -> AsyncGenerator[tuple[Bus, Line]]:
        async with self._server.connect(self.run, worker="on a line") as bus:
            yield bus, _MemoryLine(bus, self._faults)

    async def kill_server(self) -> None:
        self._server.kill()

    async def restart_server(self) -> None:
        self._server.restart()

    async def purge(self, below: int) -> None:
        self._server.stream(log_stream(self.run)).purge(below)


class Relay:
    """A TCP relay to the server: one connection's worth of network, to be cut and mended."""

    def __init__(self, host: str, port: int) -> None:
        self._host = host
        self._port = port
        self._down = False
        self._flowing = anyio.Event()
        self._flowing.set()
        self._scopes: dict[anyio.CancelScope, None] = {}
        self.port = 0

    async def cut(self) -> None:
        self._down = True
        for scope in list(self._scopes):
            scope.cancel()

    async def mend(self) -> None:
        self._flowing = anyio.Event()
        self._flowing.set()
        self._down = False

    async def hold_answers(self) -> None:
        self._flowing = anyio.Event()

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[Relay]:
        async with (
            await anyio.create_tcp_listener(local_host="127.0.0.1") as listener,
            anyio.create_task_group() as tasks,
        ):
            self.port = listener.extra(anyio.abc.SocketAttribute.local_port)
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
        async with await anyio.connect_tcp(self._host, self._port) as server, anyio.create_task_group() as tasks:
            tasks.start_soon(self._pump, client, server, False, scope)
            tasks.start_soon(self._pump, server, client, True, scope)

    async def _pump(
        self, source: anyio.abc.SocketStream, target: anyio.abc.SocketStream, may_hold: bool, scope: anyio.CancelScope
    ) -> None:
        try:
            async for chunk in source:
                if may_hold:
                    await self._flowing.wait()
                await target.send(chunk)
        except (anyio.BrokenResourceError, anyio.ClosedResourceError):
            pass  # the other side is gone, and so is this connection
        scope.cancel()


class NatsWorld(World):
    def __init__(self, server: NatsServerProcess, portal: BlockingPortal) -> None:
        super().__init__()
        self._server = server
        self._portal = portal

    def connect(self) -> AbstractAsyncContextManager[Bus]:
        return connect(self._server.url, run=self.run, role="test")

    @asynccontextmanager
    async def connect_by_line(self) -> AsyncGenerator[tuple[Bus, Line]]:
        relay = Relay("127.0.0.1", int(self._server.url.rpartition(":")[2]))
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(relay.running())
            bus = await stack.enter_async_context(connect(f"nats://127.0.0.1:{relay.port}", run=self.run, role="test"))
            yield bus, relay

    async def kill_server(self) -> None:
        await anyio.to_thread.run_sync(self._portal.call, self._server.kill)

    async def restart_server(self) -> None:
        await anyio.to_thread.run_sync(self._portal.call, self._server.restart)

    async def purge(self, below: int) -> None:
        async with connect(self._server.url, run=self.run, role="test") as bus:
            await bus._connection.api.ask(f"STREAM.PURGE.{log_stream(self.run)}", {"seq": below})


@pytest.fixture(scope="session")
def nats_server(tmp_path_factory: pytest.TempPathFactory) -> Generator[tuple[NatsServerProcess, BlockingPortal]]:
    """One nats-server for all tests; it lives in a thread of its own, so that tests come and go around it."""
    store = tmp_path_factory.mktemp("nats")
    with start_blocking_portal() as portal, portal.wrap_async_context_manager(run_server(store)) as server:
        yield server, portal


@pytest.fixture(params=["memory on asyncio", "memory on trio", "nats"])
def bus_kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def bus_backend(bus_kind: str) -> tuple[str, dict[str, Any]]:
    """The anyio backend of this kind of bus; trio runs under virtual time."""
    if bus_kind == "memory on trio":
        return "trio", {"clock": trio.testing.MockClock(autojump_threshold=0)}
    return "asyncio", {"use_uvloop": bus_kind == "nats"}


@pytest.fixture
def world(bus_kind: str, request: pytest.FixtureRequest) -> World:
    if bus_kind == "nats":
        return NatsWorld(*request.getfixturevalue("nats_server"))
    return MemoryWorld()
