"""Traps of nats-py when a client flushes: each shown to bite the bare client, and not to bite the bus."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import anyio
import nats
import pytest
from nats.aio.client import Client
from nats.errors import TimeoutError as NatsTimeoutError

from fleetbus.bus.nats import connect, connection
from fleetbus.bus.nats.wire import WireClient
from tests.support.bare_nats import RUN, SUBJECTS, ignore_error, ready_bus
from tests.support.killable_server import KillableServer, killable_server
from tests.support.relay import Relay


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KillableServer]:
    with killable_server(tmp_path_factory.mktemp("nats")) as server:
        yield server


def test_the_private_members_that_the_wire_replaces_still_exist() -> None:
    client = Client()
    for name in (
        "_process_msg",
        "_process_pong",
        "_process_err",
        "_connect_to_server",
        "_attempt_reconnect",
        "_process_op_err",
    ):
        assert asyncio.iscoroutinefunction(getattr(client, name)), name
    for name in ("_pending", "_pending_data_size", "_flush_queue", "_subs", "_sid", "_status", "_pongs", "_transport"):
        assert hasattr(client, name), name
    assert issubclass(WireClient, Client)


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


async def test_a_cancelled_flush_does_not_deafen_the_bus(server: KillableServer) -> None:
    async with ready_bus(server.url) as bus:
        wire = bus._connection.wire
        reading = wire._reading_task
        await _cancel_flush(wire)
        for _ in range(3):
            await bus._connection.round_trip(2)
        assert wire._reading_task is reading
        assert not reading.done()


async def _cancel_flush(client: Client) -> None:
    flush = asyncio.create_task(client.flush())
    await asyncio.sleep(0)
    flush.cancel()
    with pytest.raises(asyncio.CancelledError):
        await flush


async def test_a_deaf_connection_is_noticed_and_replaced(server: KillableServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever made it deaf: the read loop is simply ended here."""
    monkeypatch.setattr(connection, "WATCH_EVERY_SECONDS", 0.1)
    monkeypatch.setattr(connection, "ROUND_TRIP_LIMITS_SECONDS", (0.2, 0.1))
    monkeypatch.setattr(connection, "PING_EVERY_SECONDS", 3600)
    async with ready_bus(server.url) as bus:
        wire = bus._connection.wire
        wire._reading_task.cancel()
        assert wire.is_connected
        with anyio.fail_after(50):
            await bus.publish(SUBJECTS.episode("deaf"), b"x")
        assert wire.stats["reconnects"] == 1


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


# What the wire joins: a peer that takes nothing gets no second signal for its flusher.


class StuckTransport:
    """Holds what was written before and takes nothing more."""

    _io_writer = property(lambda self: self)
    transport = property(lambda self: self)

    def get_write_buffer_size(self) -> int:
        return 100

    def is_closing(self) -> bool:
        return False


async def test_a_peer_that_takes_nothing_fills_no_queue_with_signals() -> None:
    failures: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: failures.append(context))
    wire = WireClient(failures.append)
    wire._transport, wire._status, wire._flush_queue = StuckTransport(), Client.CONNECTED, asyncio.Queue(maxsize=4)
    for _ in range(20):
        wire.send(b"PING\r\n")
        for _ in range(5):
            await asyncio.sleep(0)
    assert wire._flush_queue.qsize() == 1
    assert wire.unwritten_bytes == 100 + 20 * 6
    assert not failures
