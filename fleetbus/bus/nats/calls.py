"""Core messages: calls with an answer, the serving of calls, and broadcasts. Nothing here is stored.

Above it is the bus; below it the connection. A subject that the log captures must never be used for a call: the log's own ack
would be taken for the answer.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import anyio.lowlevel

from fleetbus.bus.base import Request
from fleetbus.bus.nats.connection import Connection
from fleetbus.bus.nats.protocol import NO_RESPONDERS, check_subject, publish_command, status_of
from fleetbus.bus.nats.receive_queue import ReceiveQueue
from fleetbus.bus.nats.wire import Wire
from fleetbus.errors import BusError, NoResponders, RequestUnanswered

log = logging.getLogger(__name__)

_SUBSCRIBE_LIMIT_SECONDS = 5.0


async def request(connection: Connection, subject: str, payload: bytes, timeout: float) -> bytes:
    """See `fleetbus.bus.base.Bus.request`."""
    reply = connection.request_mux.new_reply()
    command = publish_command(check_subject(subject), reply, payload)
    try:
        answer, headers = await connection.request_mux.ask(reply, command, timeout=timeout)
    except TimeoutError:
        raise RequestUnanswered(f"{subject}: no answer within {timeout:g} s") from None
    if status_of(headers) == NO_RESPONDERS:
        raise NoResponders(f"no responders for {subject}")
    return answer


class NatsRequest:
    """See `fleetbus.bus.base.Request`."""

    __slots__ = ("_reply", "_wire", "payload", "subject")

    def __init__(self, wire: Wire, subject: bytes, reply: bytes, payload: bytes) -> None:
        self.subject = subject.decode()
        self.payload = payload
        self._reply = reply.decode()
        self._wire = wire

    async def respond(self, payload: bytes) -> None:
        if len(payload) > self._wire.max_payload:
            raise BusError(f"{self.subject}: an answer of {len(payload)} bytes exceeds {self._wire.max_payload}")
        if self._reply and not self._wire.send_or_drop(publish_command(self._reply, "", payload)):
            log.debug("nats: no connection; dropping the answer on %s", self.subject)


class NatsServer:
    """See `fleetbus.bus.base.RequestServer`."""

    def __init__(self, wire: Wire, limit: int) -> None:
        self._wire = wire
        self._limit = limit
        self._queue: ReceiveQueue[NatsRequest] = ReceiveQueue()

    async def receive(self) -> Request:
        return await self._queue.take()

    def on_message(self, subject: bytes, reply: bytes, payload: bytes, headers: bytes | None) -> None:
        if len(self._queue.items) >= self._limit:
            log.debug("nats: request queue of %s is full; dropping one request", subject)
            return
        self._queue.put(NatsRequest(self._wire, subject, reply, payload))


class NatsListener:
    """See `fleetbus.bus.base.Listener`."""

    def __init__(self, limit: int) -> None:
        self.dropped = 0
        self._limit = limit
        self._queue: ReceiveQueue[tuple[str, bytes]] = ReceiveQueue()

    async def receive(self) -> tuple[str, bytes]:
        return await self._queue.take()

    def on_message(self, subject: bytes, reply: bytes, payload: bytes, headers: bytes | None) -> None:
        if len(self._queue.items) >= self._limit:
            self._queue.items.popleft()
            self.dropped += 1
        self._queue.put((subject.decode(), payload))


@asynccontextmanager
async def open_server(connection: Connection, subject: str, limit: int) -> AsyncGenerator[NatsServer]:
    """Serve ``subject`` for the length of the block; inside it, callers anywhere find it."""
    server = NatsServer(connection.wire, limit)
    async with _subscribe(connection, subject, server):
        yield server


@asynccontextmanager
async def open_listener(connection: Connection, subject: str, limit: int) -> AsyncGenerator[NatsListener]:
    """Listen to ``subject`` (wildcards allowed) for the length of the block."""
    listener = NatsListener(limit)
    async with _subscribe(connection, subject, listener):
        yield listener


@asynccontextmanager
async def _subscribe(connection: Connection, subject: str, receiver: NatsServer | NatsListener) -> AsyncGenerator[None]:
    route = connection.wire.open_route(check_subject(subject), receiver.on_message)
    try:
        try:
            await connection.round_trip(_SUBSCRIBE_LIMIT_SECONDS)
        except TimeoutError:
            log.debug("nats: subscription to %s not confirmed; repeating it after a reconnect", subject)
        yield
    finally:
        connection.wire.close_route(route)


async def broadcast(connection: Connection, subject: str, payload: bytes) -> None:
    """See `fleetbus.bus.base.Bus.broadcast`."""
    if len(payload) > connection.wire.max_payload:
        raise BusError(f"{subject}: {len(payload)} bytes exceed the server's limit of {connection.wire.max_payload}")
    if not connection.wire.send_or_drop(publish_command(check_subject(subject), "", payload)):
        log.debug("nats: no connection; dropping the broadcast on %s", subject)
    await anyio.lowlevel.checkpoint()
