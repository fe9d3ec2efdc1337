"""Fixtures of the bus contract: the same interface over the in-memory server and over a real nats-server.

A `Line` is one client's connection that a test may cut or whose answers it may hold back; for NATS it is a TCP relay.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator, Generator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, Protocol

import pytest
import trio.testing

from fleetbus.bus.base import Bus
from fleetbus.bus.memory import Faults, MemoryServer
from fleetbus.bus.memory_bus import MemoryBus
from fleetbus.bus.memory_faults import NO_PUBLISH_FAULT, PublishFault
from fleetbus.bus.nats import connect, nats_py
from fleetbus.bus.streams import ConsumerPlan, RunPlan, StreamPlan, lane_stream, log_stream
from fleetbus_schemas import Subjects
from tests.support.killable_server import KillableServer, killable_server
from tests.support.relay import Relay
from tests.support.uv_loop import UvLoop

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


class _HoldAnswers(Faults):
    def __init__(self) -> None:
        self.held: set[str] = set()

    def draw_publish_fault(self, worker: str, subject: str) -> PublishFault:
        return PublishFault(lost="answer") if worker in self.held else NO_PUBLISH_FAULT


class _MemoryLine:
    def __init__(self, bus: MemoryBus, faults: _HoldAnswers) -> None:
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
        self._faults = _HoldAnswers()
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


class NatsWorld(World):
    def __init__(self, server: KillableServer) -> None:
        super().__init__()
        self._server = server

    def connect(self) -> AbstractAsyncContextManager[Bus]:
        return connect(self._server.url, run=self.run, role="test", **self._server.access)

    @asynccontextmanager
    async def connect_by_line(self) -> AsyncGenerator[tuple[Bus, Line]]:
        async with (
            Relay(self._server.url).running() as relay,
            connect(relay.url, run=self.run, role="test", **self._server.access) as bus,
        ):
            yield bus, relay

    async def kill_server(self) -> None:
        await self._server.kill()

    async def restart_server(self) -> None:
        await self._server.restart()

    async def purge(self, below: int) -> None:
        async with connect(self._server.url, run=self.run, role="test", **self._server.access) as bus:
            await bus._connection.api.ask(f"STREAM.PURGE.{log_stream(self.run)}", {"seq": below})  # type: ignore[attr-defined]


@pytest.fixture(scope="session")
def nats_server(tmp_path_factory: pytest.TempPathFactory) -> Generator[KillableServer]:
    """One nats-server for all tests; it lives in a thread of its own, so that tests come and go around it."""
    with killable_server(tmp_path_factory.mktemp("nats")) as server:
        yield server


NATS_KINDS = ("nats", "nats by public calls")


@pytest.fixture(params=["memory on asyncio", "memory on trio", *NATS_KINDS])
def bus_kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "nats by public calls":
        monkeypatch.setattr(nats_py, "PRIVATE_NAMES", ("_of_another_release",))
    return str(request.param)


@pytest.fixture
def anyio_backend(bus_kind: str) -> tuple[str, dict[str, Any]]:
    """The anyio backend of this kind of bus; trio runs under virtual time."""
    if bus_kind == "memory on trio":
        return "trio", {"clock": trio.testing.MockClock(autojump_threshold=0)}
    return "asyncio", {"loop_factory": UvLoop} if bus_kind in NATS_KINDS else {}


@pytest.fixture
def world(bus_kind: str, request: pytest.FixtureRequest) -> World:
    if bus_kind in NATS_KINDS:
        return NatsWorld(request.getfixturevalue("nats_server"))
    return MemoryWorld()
