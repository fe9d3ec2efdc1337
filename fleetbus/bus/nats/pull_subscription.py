"""Work from a durable consumer, as many messages as there are credits, each leased until acked.

Above it are the workers' intake loops; below it one `PullRequests`. What was received and not handed out goes back at the end.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import anyio

from fleetbus.bus.base import FORGOTTEN, Delivery, StreamEntry, Subscription
from fleetbus.bus.nats.api import CONSUMER_NOT_FOUND, STREAM_NOT_FOUND, ApiRefused
from fleetbus.bus.nats.connection import Connection
from fleetbus.bus.nats.protocol import parse_ack_subject, publish_command
from fleetbus.bus.nats.pull_requests import PullRequests
from fleetbus.bus.nats.receive_queue import ReceiveQueue
from fleetbus.bus.nats.wire import Wire
from fleetbus.errors import BusError, RequestUnanswered

log = logging.getLogger(__name__)

_CHECK_EVERY_SECONDS = 1.0
_DRAIN_SECONDS = 1.0


class NatsDelivery:
    """One leased message; acks are queued for the socket without waiting, so cancellation cannot come between."""

    __slots__ = ("_reply", "_wire", "delivered", "message")

    def __init__(self, wire: Wire, subject: bytes, reply: bytes, payload: bytes) -> None:
        arrival = parse_ack_subject(reply)
        self.message = StreamEntry(
            subject=subject.decode(), payload=payload, sequence=arrival.stream_sequence, time_ns=arrival.time_ns
        )
        self.delivered = arrival.delivered
        self._reply = reply.decode()
        self._wire = wire

    async def ack(self) -> None:
        self._send_ack(b"+ACK")

    async def nak(self, delay_seconds: float = 0.0) -> None:
        self._send_ack(b'-NAK {"delay": %d}' % int(delay_seconds * 1e9) if delay_seconds > 0 else b"-NAK")

    async def extend(self) -> None:
        self._send_ack(b"+WPI")

    def forget_message(self) -> None:
        self.message = FORGOTTEN

    def _send_ack(self, word: bytes) -> None:
        if not self._wire.send_or_drop(publish_command(self._reply, "", word)):
            log.debug("nats: no connection; dropping the %s of %s", word.decode(), self._reply)


class NatsSubscription:
    """See `fleetbus.bus.base.Subscription`."""

    def __init__(self, connection: Connection, stream: str, consumer: str, credits: int) -> None:
        self._connection = connection
        self._stream = stream
        self._consumer = consumer
        self._pull_requests = PullRequests(connection, self._on_message, self._on_trouble, acks=True)
        self._queue: ReceiveQueue[NatsDelivery] = ReceiveQueue()
        self._trouble = anyio.Event()
        self._pull_requests.add(credits)

    @property
    def credits(self) -> int:
        return self._pull_requests.wanted + self._pull_requests.asked + len(self._queue.items)

    def grant(self, credits: int = 1) -> None:
        self._pull_requests.add(credits)

    async def receive(self) -> Delivery:
        return await self._queue.take()

    def attach(self) -> None:
        self._pull_requests.attach(self._stream, self._consumer)

    async def watch(self) -> None:
        """Re-arm after silence; find out whether a consumer that does not answer exists at all."""
        while self._queue.failure is None:
            with anyio.move_on_after(_CHECK_EVERY_SECONDS):
                await self._trouble.wait()
            if self._trouble.is_set():
                await self._check_consumer()
            elif self._pull_requests.is_silent():
                log.warning("nats: consumer %s does not answer; pulling on a new inbox", self._consumer)
                self.attach()

    async def _check_consumer(self) -> None:
        self._trouble = anyio.Event()
        await anyio.sleep(_CHECK_EVERY_SECONDS / 4)  # it may be moving between servers
        try:
            await self._connection.api.ask(f"CONSUMER.INFO.{self._stream}.{self._consumer}")
        except ApiRefused as refused:
            if refused.code in (CONSUMER_NOT_FOUND, STREAM_NOT_FOUND):
                reason = "does not exist: create the run first (fleetbus init)"
            else:
                reason = f"cannot be pulled from: {refused}"
            self._queue.fail(BusError(f"consumer {self._consumer} of stream {self._stream} {reason}"))
        except RequestUnanswered:
            self._trouble.set()
        else:
            self.attach()

    def _on_message(self, subject: bytes, reply: bytes, payload: bytes) -> None:
        self._queue.put(NatsDelivery(self._connection.wire, subject, reply, payload))

    def _on_trouble(self, text: str) -> None:
        self._trouble.set()

    async def leave(self) -> None:
        """Stop pulling and return undelivered messages, those in flight included."""
        wire = self._connection.wire
        route = self._pull_requests.close(late=self._nak_late)
        for delivery in self._queue.items:
            await delivery.nak()
        self._queue.items.clear()
        self._connection.tasks.start_soon(self._drain_late_messages, wire, route, name="nats late messages")

    async def _drain_late_messages(self, wire: Wire, route: int) -> None:
        try:
            await self._connection.round_trip(_DRAIN_SECONDS)
        except TimeoutError:
            log.debug("nats: return of messages in flight to %s failed; leaving them to redelivery", self._consumer)
        finally:
            wire.close_route(route)

    def _nak_late(self, subject: bytes, reply: bytes, payload: bytes, headers: bytes | None) -> None:
        if reply:
            self._connection.wire.send_or_drop(publish_command(reply.decode(), "", b"-NAK"))


@asynccontextmanager
async def open_subscription(connection: Connection, stream: str, consumer: str, credits: int) -> AsyncGenerator[Subscription]:
    """Pull from ``consumer`` for the length of the block."""
    subscription = NatsSubscription(connection, stream, consumer, credits)
    scope = anyio.CancelScope()

    async def watch() -> None:
        with scope:
            await subscription.watch()

    connection.tasks.start_soon(watch, name=f"nats pull {consumer}")
    connection.on_reconnect[subscription] = subscription.attach
    subscription.attach()
    try:
        yield subscription
    finally:
        del connection.on_reconnect[subscription]
        scope.cancel()
        await subscription.leave()
