"""Traps of nats-py that lose or hold messages when somebody is cancelled: each bites the bare client, and not the bus."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import anyio
import nats
import pytest

from fleetbus.bus.nats import connect, publisher
from fleetbus.bus.nats.protocol import publish_with_headers_command, status_of
from fleetbus.bus.nats.publisher import OUTSTANDING_BYTES
from fleetbus.bus.streams import tasks_consumer
from fleetbus.errors import PublishUnanswered
from tests.support.bare_nats import RUN, SUBJECTS, ignore_error, ready_bus
from tests.support.killable_server import KillableServer, killable_server
from tests.support.relay import Relay


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KillableServer]:
    with killable_server(tmp_path_factory.mktemp("nats"), form="open") as server:
        yield server


# Trap 3: publish swallows cancellation while the relay does not read.


async def test_the_bare_publish_swallows_its_cancellation(server: KillableServer) -> None:
    async with Relay(server.url).running() as relay:
        client = await nats.connect(relay.url, error_cb=ignore_error)
        relay.reading = anyio.Event()
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


@pytest.mark.integration
async def test_publishing_on_the_bus_to_a_peer_that_stops_reading_can_be_cancelled_and_is_bounded(
    server: KillableServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publisher, "RESEND_SECONDS", 0.05)  # what is not read yet is not sent again
    outcomes: list[str] = []

    async def publish(bus: Any, number: int, timeout: float) -> None:
        try:
            await bus.publish(SUBJECTS.episode(f"stalled{number}"), bytes(1 << 19), timeout=timeout)
        except PublishUnanswered:
            outcomes.append("unanswered")

    async with ready_bus(server.url), Relay(server.url).running() as relay, connect(relay.url, run=RUN) as bus:
        relay.reading = anyio.Event()
        with anyio.fail_after(50):
            async with anyio.create_task_group() as tasks:
                for number in range(150):  # each window of them gives up with its bytes unwritten, and makes room for the next
                    tasks.start_soon(publish, bus, number, 1.0 + number // 50)
                with anyio.move_on_after(0.2) as scope:
                    await bus.publish(SUBJECTS.episode("cancelled"), b"x")
                assert scope.cancelled_caught
                most = 0
                while len(outcomes) < 150:
                    most = max(most, bus._connection.wire.unwritten_bytes)  # type: ignore[attr-defined]
                    await anyio.sleep(0.02)
            assert most < OUTSTANDING_BYTES + (2 << 20)
        relay.reading.set()


# Trap 5: a cancelled fetch leaves its pull request at the server, which swallows the next message.


async def test_a_cancelled_bare_fetch_swallows_the_next_message(server: KillableServer) -> None:
    async with ready_bus(server.url) as bus:
        client = await nats.connect(server.url, error_cb=ignore_error)
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


async def test_a_left_pull_on_the_bus_leaves_no_request_behind(server: KillableServer) -> None:
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
            await other._connection.round_trip(2)  # type: ignore[attr-defined]


async def _waiting(bus: Any) -> int:
    info = await bus._connection.api.ask(f"CONSUMER.INFO.fb_{RUN}.{tasks_consumer('default')}")  # type: ignore[attr-defined]
    return int(info["num_waiting"])


async def _until_waiting(bus: Any, count: int) -> None:
    with anyio.fail_after(50):
        while await _waiting(bus) != count:
            await anyio.lowlevel.checkpoint()


# Trap 7: the iterator of a subscription loses a message that arrives just as it is cancelled.


async def test_the_bare_iterator_loses_a_message_to_a_cancellation(server: KillableServer) -> None:
    client = await nats.connect(server.url, error_cb=ignore_error)
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


async def test_the_bus_loses_no_message_to_a_cancellation(server: KillableServer) -> None:
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


# Headers are the publisher's: what looks like a server's own answer in them is part of an entry.


@pytest.mark.parametrize("line", ["XATS/1.0 404 Not Found", "XATS/1.0 204 EOB", "NATS/1.0 599 x", "XATS/1.0 503 "])
async def test_an_entry_whose_publisher_wrote_a_status_into_its_headers_hides_none(server: KillableServer, line: str) -> None:
    subject = SUBJECTS.episode("headers")
    async with ready_bus(server.url) as bus:
        first = (await bus.publish(subject, b"before")).sequence
        mux = bus._connection.request_mux
        reply = mux.new_reply()
        headers = f"{line}\r\nNats-Sequence: 1\r\nNats-Subject: {SUBJECTS.policy('default')}\r\n\r\n".encode()
        with anyio.fail_after(20):
            await mux.ask(reply, publish_with_headers_command(subject, reply, headers, b"forged"), timeout=10)
            last = await bus.last(subject)
            await bus.publish(subject, b"after")
            found = [entry for entry in await bus.history([subject]) if entry.sequence >= first]
    assert last is not None and (last.subject, last.sequence, last.payload) == (subject, first + 1, b"forged")
    assert [(entry.subject, entry.sequence, entry.payload) for entry in found] == [
        (subject, first + number, payload) for number, payload in enumerate((b"before", b"forged", b"after"))
    ]


def test_a_status_is_one_that_the_server_made() -> None:
    assert status_of(b"NATS/1.0 204 EOB\r\nNats-Num-Pending: 0\r\nNats-Last-Sequence: 7\r\n\r\n") == 204
    assert status_of(b"NATS/1.0 404\r\nX: y\r\nNats-Stream: log\r\nNats-Sequence: 7\r\n\r\n") == 0
    assert status_of(b"XATS/1.0 404\r\n\r\n") == status_of(b"NATS/1.0\r\n\r\n") == status_of(None) == 0
