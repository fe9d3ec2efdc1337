"""The traps of nats-py that the bus defends against: each shown to bite the bare client, and not to bite the bus."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import anyio
import anyio.abc
import nats
import pytest
from anyio.from_thread import BlockingPortal, start_blocking_portal
from nats.aio.client import Client
from nats.errors import TimeoutError as NatsTimeoutError

from fleetbus.bus.nats import connect, connection, publisher
from fleetbus.bus.nats.publisher import OUTSTANDING_BYTES
from fleetbus.bus.nats.server import NatsServerProcess, run_server
from fleetbus.bus.nats.wire import WireClient
from fleetbus.bus.streams import plan_run, tasks_consumer
from fleetbus.errors import PublishUnanswered
from schemas import Subjects

RUN = "traps"
SUBJECTS = Subjects(RUN)


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
def portal() -> Generator[BlockingPortal]:
    with start_blocking_portal() as portal:
        yield portal


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, portal: BlockingPortal) -> Generator[NatsServerProcess]:
    with portal.wrap_async_context_manager(run_server(tmp_path_factory.mktemp("nats"))) as server:
        yield server


@asynccontextmanager
async def ready_bus(url: str) -> AsyncGenerator[Any]:
    async with connect(url, run=RUN) as bus:
        await bus.declare(plan_run(RUN, lanes=1, max_bytes=0))
        yield bus


async def silent(error: Exception) -> None:
    """The bare client's error callback: the tests provoke errors on purpose."""


class Peer:
    """A relay to the server that writes down what the client sends and can stop reading it."""

    def __init__(self, upstream: str) -> None:
        self._upstream_port = int(upstream.rpartition(":")[2])
        self.heard = bytearray()
        self.reading = anyio.Event()
        self.reading.set()
        self.url = ""

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[Peer]:
        async with (
            await anyio.create_tcp_listener(local_host="127.0.0.1") as listener,
            anyio.create_task_group() as tasks,
        ):
            self.url = f"nats://127.0.0.1:{listener.extra(anyio.abc.SocketAttribute.local_port)}"
            tasks.start_soon(listener.serve, self._serve)
            yield self
            tasks.cancel_scope.cancel()

    async def _serve(self, client: anyio.abc.SocketStream) -> None:
        async with client:
            try:
                upstream = await anyio.connect_tcp("127.0.0.1", self._upstream_port)
            except OSError:
                return  # the server is down
            async with upstream, anyio.create_task_group() as tasks:
                tasks.start_soon(self._pump, upstream, client, None, tasks.cancel_scope)
                tasks.start_soon(self._pump, client, upstream, self.heard, tasks.cancel_scope)

    async def _pump(self, source: Any, target: Any, record: bytearray | None, scope: anyio.CancelScope) -> None:
        try:
            async for chunk in source:
                if record is not None:
                    await self.reading.wait()
                    record += chunk
                await target.send(chunk)
        except (anyio.BrokenResourceError, anyio.ClosedResourceError):
            pass  # one side closed, as tests do
        scope.cancel()


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


async def test_a_cancelled_flush_deafens_the_bare_client(server: NatsServerProcess, caplog: pytest.LogCaptureFixture) -> None:
    client = await nats.connect(server.url, error_cb=silent)
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


async def test_a_cancelled_flush_does_not_deafen_the_bus(server: NatsServerProcess) -> None:
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


async def test_a_deaf_connection_is_noticed_and_replaced(server: NatsServerProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever made it deaf: the read loop is simply ended here."""
    monkeypatch.setattr(connection, "WATCH_EVERY_SECONDS", 0.1)
    monkeypatch.setattr(connection, "ROUND_TRIP_LIMITS_SECONDS", (0.2, 0.1))
    async with ready_bus(server.url) as bus:
        wire = bus._connection.wire
        wire._reading_task.cancel()
        assert wire.is_connected
        with anyio.fail_after(50):
            await bus.publish(SUBJECTS.episode("deaf"), b"x")
        assert wire.stats["reconnects"] == 1


# Trap 2: flush is no barrier, its PING overtakes what was queued before it.


async def test_the_bare_flush_overtakes_the_subscription_before_it(server: NatsServerProcess) -> None:
    async with Peer(server.url).running() as peer:
        client = await nats.connect(peer.url, error_cb=silent)
        peer.heard.clear()
        await client.subscribe("trap2")
        await client.flush()
        await client.flush()
        await client.close()
    assert peer.heard.startswith(b"PING")
    assert peer.heard.index(b"SUB trap2") > 0


async def test_whoever_serves_on_the_bus_has_its_subscription_at_the_server(server: NatsServerProcess) -> None:
    async with Peer(server.url).running() as peer, connect(peer.url, run=RUN) as bus:
        peer.heard.clear()
        async with bus.serve(SUBJECTS.rpc("w", "s")):
            assert peer.heard.startswith(b"SUB fbrpc.traps.w.s")
            assert b"PUB _INBOX_" in peer.heard  # the round trip behind it, which has come back


# Trap 3: publish swallows cancellation while the peer does not read.


async def test_the_bare_publish_swallows_its_cancellation(server: NatsServerProcess) -> None:
    async with Peer(server.url).running() as peer:
        client = await nats.connect(peer.url, error_cb=silent)
        peer.reading = anyio.Event()
        sent = 0
        with anyio.move_on_after(0.3) as scope:
            for _ in range(40):
                await client.publish("trap3", bytes(1 << 19))
                sent += 1
        assert sent == 40
        assert not scope.cancelled_caught
        assert client.pending_data_size > 2 << 20
        client._transport._io_writer.transport.abort()
        with suppress(ConnectionResetError):
            await client.close()


async def test_publishing_on_the_bus_to_a_peer_that_stops_reading_can_be_cancelled_and_is_bounded(
    server: NatsServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publisher, "RESEND_SECONDS", 0.05)  # what is not read yet is not sent again
    outcomes: list[str] = []

    async def publish(bus: Any, number: int) -> None:
        try:
            await bus.publish(SUBJECTS.episode(f"stalled{number}"), bytes(1 << 19), timeout=1.0)
        except PublishUnanswered:
            outcomes.append("unanswered")

    async with ready_bus(server.url), Peer(server.url).running() as peer, connect(peer.url, run=RUN) as bus:
        peer.reading = anyio.Event()
        with anyio.fail_after(50):
            async with anyio.create_task_group() as tasks:
                for number in range(150):
                    tasks.start_soon(publish, bus, number)
                with anyio.move_on_after(0.2) as scope:
                    await bus.publish(SUBJECTS.episode("cancelled"), b"x")
                assert scope.cancelled_caught
                assert bus._connection.wire.unwritten_bytes < OUTSTANDING_BYTES + (2 << 20)
        assert outcomes == ["unanswered"] * 150
        peer.reading.set()


# Trap 5: a cancelled fetch leaves its pull request at the server, which swallows the next message.


async def test_a_cancelled_bare_fetch_swallows_the_next_message(server: NatsServerProcess) -> None:
    async with ready_bus(server.url) as bus:
        client = await nats.connect(server.url, error_cb=silent)
        puller = await client.jetstream().pull_subscribe_bind(consumer=tasks_consumer("default"), stream=f"fb_{RUN}")
        fetching = asyncio.create_task(puller.fetch(1, timeout=30))
        await _until_waiting(bus, 1)
        fetching.cancel()
        with pytest.raises(asyncio.CancelledError):
            await fetching
        assert await _waiting(bus) == 1
        await bus.publish(SUBJECTS.task("default", "swallowed"), b"x")
        async with bus.pull(tasks_consumer("default"), credits=1) as subscription:
            with anyio.move_on_after(0.5) as scope:
                await subscription.receive()
            assert scope.cancelled_caught
        for message in await puller.fetch(1, timeout=1):
            await message.ack_sync()
        await client.close()


async def test_a_left_pull_on_the_bus_leaves_no_request_behind(server: NatsServerProcess) -> None:
    async with ready_bus(server.url) as bus, connect(server.url, run=RUN) as other:
        with anyio.move_on_after(5):
            async with bus.pull(tasks_consumer("default"), credits=3):
                await _until_waiting(bus, 1)
        await _until_waiting(bus, 0)
        await bus.publish(SUBJECTS.task("default", "free"), b"x")
        async with other.pull(tasks_consumer("default"), credits=1) as subscription:
            with anyio.fail_after(50):
                delivery = await subscription.receive()
            assert delivery.delivered == 1
            await delivery.ack()
            await other._connection.round_trip(2)


async def _waiting(bus: Any) -> int:
    info = await bus._connection.api.ask(f"CONSUMER.INFO.fb_{RUN}.{tasks_consumer('default')}")
    return int(info["num_waiting"])


async def _until_waiting(bus: Any, count: int) -> None:
    with anyio.fail_after(50):
        while await _waiting(bus) != count:
            await anyio.lowlevel.checkpoint()


# Trap 7: the iterator of a subscription loses a message that arrives just as it is cancelled.


async def test_the_bare_iterator_loses_a_message_to_a_cancellation(server: NatsServerProcess) -> None:
    client = await nats.connect(server.url, error_cb=silent)
    lost = 0
    for ticks in range(6):
        subscription = await client.subscribe(f"trap7.{ticks}")
        waiting = asyncio.create_task(subscription.messages.__anext__())
        await asyncio.sleep(0.01)
        subscription._pending_queue.put_nowait(nats.aio.msg.Msg(_client=client, subject="trap7", data=b"x"))
        for _ in range(ticks):
            await asyncio.sleep(0)
        waiting.cancel()
        got = (await asyncio.gather(waiting, return_exceptions=True))[0]
        lost += isinstance(got, asyncio.CancelledError) and subscription.pending_msgs == 0
    await client.close()
    assert lost > 0


async def test_the_bus_loses_no_message_to_a_cancellation(server: NatsServerProcess) -> None:
    async with ready_bus(server.url) as bus:
        kept = 0
        for ticks in range(6):
            async with bus.listen(f"trap7.{ticks}") as listener:
                waiting = asyncio.create_task(listener.receive())
                await asyncio.sleep(0.01)
                listener.on_message(b"trap7", b"", b"x", None)
                for _ in range(ticks):
                    await asyncio.sleep(0)
                waiting.cancel()
                got = (await asyncio.gather(waiting, return_exceptions=True))[0]
                if isinstance(got, asyncio.CancelledError):
                    got = await listener.receive()
                kept += got == ("trap7", b"x")
        assert kept == 6


# Trap 8: drain under a cancelled scope leaves the connection half closed.


async def test_a_cancelled_bare_drain_leaves_the_connection_half_closed(server: NatsServerProcess) -> None:
    client = await nats.connect(server.url, error_cb=silent)
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


async def test_leaving_the_bus_under_cancellation_closes_it(server: NatsServerProcess) -> None:
    with anyio.CancelScope() as scope:
        async with ready_bus(server.url) as bus:
            wire = bus._connection.wire
            scope.cancel()
            await anyio.sleep_forever()
    assert wire.is_closed
    assert wire._reading_task.done()


async def test_leaving_the_bus_is_quick_while_the_server_is_dead(server: NatsServerProcess, portal: BlockingPortal) -> None:
    async with ready_bus(server.url) as bus, bus.pull(tasks_consumer("default"), credits=1):
        wire = bus._connection.wire
        await anyio.to_thread.run_sync(portal.call, server.kill)
        with anyio.move_on_after(0.1):
            await bus.publish(SUBJECTS.episode("never"), bytes(1 << 19))
        left_at = anyio.current_time()
    try:
        assert anyio.current_time() - left_at < 10
        assert wire.is_closed
    finally:
        await anyio.to_thread.run_sync(portal.call, server.restart)


async def test_acks_sent_last_have_arrived_when_the_bus_is_left(server: NatsServerProcess) -> None:
    async with ready_bus(server.url) as watching:
        async with connect(server.url, run=RUN) as bus:
            await bus.publish(SUBJECTS.task("default", "last"), b"x")
            async with bus.pull(tasks_consumer("default"), credits=1) as subscription:
                await (await subscription.receive()).ack()
        info = await watching._connection.api.ask(f"CONSUMER.INFO.fb_{RUN}.{tasks_consumer('default')}")
        assert info["num_ack_pending"] == 0


# Trap 10: what is under way when the server dies.


async def test_a_bare_publish_to_a_dead_server_gives_up_and_the_bus_does_not(
    server: NatsServerProcess, portal: BlockingPortal
) -> None:
    async with ready_bus(server.url) as bus:
        client = await nats.connect(server.url, error_cb=silent, reconnect_time_wait=0.05)
        await anyio.to_thread.run_sync(portal.call, server.kill)
        results = []

        async def publish() -> None:
            results.append(await bus.publish(SUBJECTS.episode("survivor"), b"x", expected_last=0))

        with anyio.fail_after(50):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(publish)
                with pytest.raises(NatsTimeoutError):
                    await client.jetstream().publish(SUBJECTS.episode("bare"), b"x", timeout=0.3)
                await anyio.to_thread.run_sync(portal.call, server.restart)
        stored = await bus.last(SUBJECTS.episode("survivor"))
        assert stored.sequence == results[0].sequence
        await client.close()


async def test_after_a_reconnect_the_inboxes_of_before_are_gone_and_what_waits_is_sent_again_at_once(
    server: NatsServerProcess, portal: BlockingPortal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publisher, "RESEND_SECONDS", 60.0)
    async with ready_bus(server.url), Peer(server.url).running() as peer, connect(peer.url, run=RUN) as bus:
        async with bus.pull(tasks_consumer("default"), credits=1) as subscription, anyio.create_task_group() as tasks:
            await bus._connection.round_trip(2)
            inbox = subscription._line._inbox.encode()
            assert b"SUB " + inbox in peer.heard
            peer.reading = anyio.Event()
            tasks.start_soon(bus.publish, SUBJECTS.task("default", "waiting"), b"x")
            await anyio.sleep(0.05)
            await anyio.to_thread.run_sync(portal.call, server.kill)
            peer.heard.clear()
            peer.reading.set()
            await anyio.to_thread.run_sync(portal.call, server.restart)
            with anyio.fail_after(50):
                delivery = await subscription.receive()
            await delivery.ack()
        assert inbox + b"." not in peer.heard
        assert subscription._line._inbox.encode() in peer.heard


def test_the_store_of_the_server_is_not_the_working_directory(server: NatsServerProcess) -> None:
    assert not list(Path.cwd().glob("*.ports"))
    assert list(server.store.glob("*.ports"))
