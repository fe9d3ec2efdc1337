"""Traps of nats-py when a client flushes: each shown to bite the bare client, and not to bite the bus."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import anyio
import nats
import pytest
from nats.aio.client import Client
from nats.errors import TimeoutError as NatsTimeoutError

from fleetbus.bus.nats import connect, connection
from fleetbus.bus.nats.message_parser import MessageParser
from fleetbus.bus.nats.socket_wire import SocketWire
from tests.support.bare_nats import RUN, SUBJECTS, ignore_error, ready_bus
from tests.support.killable_server import KillableServer, killable_server
from tests.support.relay import Relay


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KillableServer]:
    with killable_server(tmp_path_factory.mktemp("nats"), form="open") as server:
        yield server


# Trap 1: a cancelled flush ends the read loop, and the client still claims to be connected.


async def test_a_cancelled_flush_deafens_the_bare_client(server: KillableServer, caplog: pytest.LogCaptureFixture) -> None:
    client = await nats.connect(server.url, error_cb=ignore_error)
    try:
        heard = await client.subscribe("trap1")
        await _cancel_flush(client)
        with anyio.fail_after(50):
            while not client._reading_task.done():  # noqa: ASYNC110  # nothing tells of it: that is the trap
                await anyio.sleep(0.005)
        await client.publish("trap1", b"x")
        with pytest.raises(NatsTimeoutError):
            await heard.next_msg(timeout=0.3)
        assert client.is_connected
        assert "InvalidStateError" in caplog.text
    finally:
        await client.close()


async def test_a_cancelled_flush_does_not_deafen_the_bus(server: KillableServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of the bus flushes; whoever does ends nats-py's reading of the lines that are no messages, until it pings."""
    monkeypatch.setattr(connection, "PING_EVERY_SECONDS", 0.1)
    async with ready_bus(server.url), Relay(server.url).running() as relay, connect(relay.url, run=RUN) as bus:
        inner = bus._connection  # type: ignore[attr-defined]
        await _cancel_flush(inner.wire.client)
        for _ in range(3):
            await inner.round_trip(2)
        await relay.cut()
        await relay.mend()
        with anyio.fail_after(50):
            await bus.publish(SUBJECTS.episode("deaf"), b"x")


async def _cancel_flush(client: Client) -> None:
    flush = asyncio.create_task(client.flush())
    await asyncio.sleep(0)
    flush.cancel()
    with pytest.raises(asyncio.CancelledError):
        await flush


async def test_a_deaf_connection_is_noticed_and_replaced(server: KillableServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever made it deaf: what arrives is simply not looked at."""
    monkeypatch.setattr(connection, "WATCH_EVERY_SECONDS", 0.1)
    monkeypatch.setattr(connection, "ROUND_TRIP_LIMITS_SECONDS", (0.2, 0.1))
    monkeypatch.setattr(connection, "PING_EVERY_SECONDS", 3600)
    async with ready_bus(server.url) as bus:
        wire = bus._connection.wire
        monkeypatch.setattr(wire._transport.socket, "_parser", MessageParser(lambda *message: None))
        with anyio.fail_after(50):
            await bus.publish(SUBJECTS.episode("deaf"), b"x")
        assert wire.client.stats["reconnects"] == 1


# Trap 2: flush is no barrier, its PING overtakes what was queued before it.


async def test_the_bare_flush_overtakes_the_subscription_before_it(server: KillableServer) -> None:
    async with Relay(server.url).running() as relay:
        client = await nats.connect(relay.url, error_cb=ignore_error)
        relay.heard.clear()
        await client.subscribe("trap2")
        await client.flush()
        await client.flush()
        await client.close()
    assert relay.heard.startswith(b"PING")
    assert relay.heard.index(b"SUB trap2") > 0


async def test_whoever_serves_on_the_bus_has_its_subscription_at_the_server(server: KillableServer) -> None:
    async with Relay(server.url).running() as relay, connect(relay.url, run=RUN) as bus:
        relay.heard.clear()
        async with bus.serve(SUBJECTS.rpc("w", "s")):
            assert relay.heard.startswith(b"SUB fbrpc.traps.w.s")
            assert b"PUB _INBOX_" in relay.heard  # the round trip behind it, which has come back


# What waits for a peer that takes nothing.


class StuckTransport:
    """Holds what was written before."""

    written = 0

    def get_write_buffer_size(self) -> int:
        return 100

    def write(self, data: bytes) -> None:
        self.written += len(data)


async def test_a_peer_that_takes_nothing_gets_the_rest_once_it_reads_on() -> None:
    failures: list[Any] = []
    wire = SocketWire(failures.append)
    socket = wire._transport._make_socket()
    stuck = StuckTransport()
    socket.transport, socket.is_paused, wire._transport.socket, wire.ready = stuck, True, socket, True  # type: ignore[assignment]
    for _ in range(20):
        wire.send(b"PING\r\n")
        for _ in range(5):
            await asyncio.sleep(0)
    assert (wire.unwritten_bytes, stuck.written) == (100 + 20 * 6, 0)
    socket.resume_writing()
    assert (wire.unwritten_bytes, stuck.written) == (100, 20 * 6)
    assert not failures
