"""Traps of nats-py at the end of a connection or of a server: each shown to bite the bare client, and not to bite the bus."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import anyio
import nats
import pytest
from nats.errors import TimeoutError as NatsTimeoutError

from fleetbus.bus.nats import connect, publisher
from fleetbus.bus.nats.protocol import publish_command
from fleetbus.bus.streams import tasks_consumer
from tests.support.bare_nats import RUN, SUBJECTS, ignore_error, ready_bus
from tests.support.killable_server import KillableServer, killable_server
from tests.support.relay import Relay


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KillableServer]:
    with killable_server(tmp_path_factory.mktemp("nats"), form="open") as server:
        yield server


# Trap 8: drain under a cancelled scope leaves the connection half closed.


async def test_a_cancelled_bare_drain_leaves_the_connection_half_closed(server: KillableServer) -> None:
    client = await nats.connect(server.url, error_cb=ignore_error)
    await client.subscribe("trap8")
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(client.drain)
        while not client.is_draining:
            await anyio.lowlevel.checkpoint()
        tasks.cancel_scope.cancel()
    assert client.is_draining
    assert not client.is_closed
    client._transport._io_writer.transport.abort()
    await client.close()


async def test_leaving_the_bus_under_cancellation_closes_it(server: KillableServer) -> None:
    with anyio.CancelScope() as scope:
        async with ready_bus(server.url) as bus:
            wire = bus._connection.wire  # type: ignore[attr-defined]
            scope.cancel()
            await anyio.sleep_forever()
    assert wire.client.is_closed
    assert wire.client._reading_task.done()


async def test_leaving_the_bus_is_quick_while_the_server_is_dead(server: KillableServer) -> None:
    async with ready_bus(server.url) as bus, bus.pull(tasks_consumer("default"), credits=1):
        wire = bus._connection.wire  # type: ignore[attr-defined]
        await server.kill()
        with anyio.move_on_after(0.1):
            await bus.publish(SUBJECTS.episode("never"), bytes(1 << 19))
        left_at = anyio.current_time()
    try:
        assert anyio.current_time() - left_at < 10
        assert wire.client.is_closed
    finally:
        await server.restart()


async def test_acks_sent_last_have_arrived_when_the_bus_is_left(server: KillableServer) -> None:
    async with ready_bus(server.url) as watching:
        async with connect(server.url, run=RUN) as bus:
            await bus.publish(SUBJECTS.task("default", "last"), b"x")
            async with bus.pull(tasks_consumer("default"), credits=1) as subscription:
                await (await subscription.receive()).ack()
        info = await watching._connection.api.ask(f"CONSUMER.INFO.fb_{RUN}.{tasks_consumer('default')}")  # type: ignore[attr-defined]
        assert info["num_ack_pending"] == 0


# Trap 10: what is under way when the server dies.


async def test_a_bare_publish_to_a_dead_server_gives_up_and_the_bus_does_not(server: KillableServer) -> None:
    async with ready_bus(server.url) as bus:
        client = await nats.connect(server.url, error_cb=ignore_error, reconnect_time_wait=0.05)
        await server.kill()
        results = []

        async def publish() -> None:
            results.append(await bus.publish(SUBJECTS.episode("survivor"), b"x", expected_last=0))

        with anyio.fail_after(50):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(publish)
                with pytest.raises(NatsTimeoutError):
                    await client.jetstream().publish(SUBJECTS.episode("bare"), b"x", timeout=0.3)
                await server.restart()
        stored = await bus.last(SUBJECTS.episode("survivor"))
        assert stored.sequence == results[0].sequence
        with suppress(ConnectionError):  # it may not be connected again yet
            await client.close()


async def test_after_a_reconnect_the_inboxes_of_before_are_gone_and_what_waits_is_sent_again_at_once(
    server: KillableServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publisher, "RESEND_SECONDS", 60.0)
    async with ready_bus(server.url), Relay(server.url).running() as relay, connect(relay.url, run=RUN) as bus:
        async with bus.pull(tasks_consumer("default"), credits=1) as subscription, anyio.create_task_group() as tasks:
            await bus._connection.round_trip(2)  # type: ignore[attr-defined]
            inbox = subscription._pull_requests._inbox.encode()  # type: ignore[attr-defined]
            assert b"SUB " + inbox in relay.heard
            relay.reading = anyio.Event()
            tasks.start_soon(bus.publish, SUBJECTS.task("default", "waiting"), b"x")
            await anyio.sleep(0.05)
            await server.kill()
            relay.heard.clear()
            relay.reading.set()
            await server.restart()
            with anyio.fail_after(50):
                delivery = await subscription.receive()
            await delivery.ack()
        assert inbox + b"." not in relay.heard
        assert subscription._pull_requests._inbox.encode() in relay.heard  # type: ignore[attr-defined]


async def test_what_was_not_sent_when_a_connection_broke_is_not_sent_on_the_next(server: KillableServer) -> None:
    """It may be a pull request on an inbox that nobody reads any more, which would swallow messages."""
    async with ready_bus(server.url), Relay(server.url).running() as relay, connect(relay.url, run=RUN) as bus:
        wire = bus._connection.wire  # type: ignore[attr-defined]
        relay.reading = anyio.Event()
        for _ in range(16):
            wire.send(publish_command("fbhb.stalled", "", bytes(1 << 20)))
        with anyio.fail_after(50):
            while not wire._transport.socket.is_paused:  # type: ignore[attr-defined]  # noqa: ASYNC110  # the peer does not read
                await anyio.sleep(0.01)
            wire.send(publish_command("fbhb.left", "", b"x"))
            await anyio.sleep(0.05)
            assert wire.unwritten_bytes
            await relay.cut()
            relay.heard.clear()
            relay.reading.set()
            await relay.mend()
            await bus.publish(SUBJECTS.episode("next"), b"x")
        assert b"PUB fbhb.left" not in relay.heard


def test_the_store_of_the_server_is_not_the_working_directory(server: KillableServer) -> None:
    assert not list(Path.cwd().glob("*.ports"))
    assert list(server.store.glob("*.ports"))
