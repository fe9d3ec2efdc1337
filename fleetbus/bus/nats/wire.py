"""One socket to a server: nats-py's client, with the parts replaced that do not survive cancellation or a stuck peer.

nats-py keeps the connection (TLS, keys, reconnecting, parsing). Sending never waits here: a command joins the outgoing buffer
and is written at the next turn of the loop, in order, so there is nothing to cancel. Incoming messages go straight to a plain
function per subscription. It uses private members of nats-py 2.16, which is why the release is pinned.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress

from nats.aio.client import Client
from nats.aio.subscription import Subscription
from nats.errors import AuthorizationError, Error

from fleetbus.bus.nats.message_parser import MessageParser
from fleetbus.bus.nats.protocol import subscribe_command, unsubscribe_command

log = logging.getLogger(__name__)


def _is_loggable(record: logging.LogRecord) -> bool:
    return "eof_received() has no effect when using ssl" not in record.msg


logging.getLogger("asyncio").addFilter(_is_loggable)  # nats-py upgrades a plain stream to TLS: harmless, at every close

Handler = Callable[[bytes, bytes, bytes, bytes | None], None]
"""Called with subject, reply subject, payload and raw header block of one message; must not block and must not raise."""

MAX_BUFFERED_BYTES = 32 << 20
"""Outgoing bytes beyond which acks and core messages are dropped, and nothing else is sent: the peer has stopped reading."""

STALLED_BYTES = 1 << 20

FLUSH_BYTES = 64 << 10
"""So much is written without waiting for more."""

DIRECT_BYTES = 1 << 20
"""Up to so many bytes are written in one piece; more is left to nats-py's flusher, which waits for the peer to read."""

FLUSH_TURNS = 8
"""Turns of the loop until what was sent is written, at most: what other tasks send meanwhile, and what arrived answers leads
to, goes into the same system call, and wakes the server once."""

QUIET_TURNS = 2
"""It is written after so many turns in which nothing more was sent: a single session need not wait for others."""


class _FlushSignal:
    """Stands in for the future that nats-py's flusher completes after writing; it is never awaited."""

    def done(self) -> bool:
        return True


_FLUSH_SIGNAL = _FlushSignal()


class WireClient(Client):  # type: ignore[misc]  # nats-py is untyped
    """A nats-py client that dispatches to plain functions and sends without waiting.

    ``on_crash`` hears of an exception that a handler raised, which is a bug in this package.
    """

    def __init__(self, on_crash: Callable[[Exception], None]) -> None:
        super().__init__()
        self._on_crash = on_crash
        self._pending: list[bytes] = []
        self._pending_data_size = 0
        self._ps = MessageParser(self, self._dispatch)
        self._loop = asyncio.get_running_loop()
        self._turns_to_flush = self._quiet_turns = self._size_seen = 0
        self._handlers: dict[int, Handler] = {}
        self._ephemeral: set[int] = set()

    @property
    def ready(self) -> bool:
        """True while commands that are sent now can reach the server."""
        return bool(self._status == Client.CONNECTED)

    @property
    def unwritten_bytes(self) -> int:
        """Bytes that wait here and in the transport until the peer reads."""
        writer = getattr(self._transport, "_io_writer", None)
        buffered = 0 if writer is None else writer.transport.get_write_buffer_size()
        return int(self._pending_data_size + buffered)

    def has_room(self, *, again: bool) -> bool:
        """False while so much waits to be written that more would only add to it, or, sooner, what was sent before."""
        return self.unwritten_bytes <= (STALLED_BYTES if again else MAX_BUFFERED_BYTES)

    def send(self, command: bytes) -> None:
        """Queue a command for the socket; call it only while `ready`."""
        self._pending.append(command)
        self._pending_data_size += len(command)
        if not self._turns_to_flush:
            self._turns_to_flush = FLUSH_TURNS
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        """Write what waits here once its turns are over, unless the transport holds earlier bytes: then the flusher does."""
        self._turns_to_flush -= 1
        self._quiet_turns = self._quiet_turns + 1 if self._pending_data_size == self._size_seen else 0
        self._size_seen = self._pending_data_size
        if self._turns_to_flush and self._quiet_turns < QUIET_TURNS and self._pending_data_size <= FLUSH_BYTES:
            self._loop.call_soon(self._flush)
            return
        self._turns_to_flush = self._quiet_turns = self._size_seen = 0
        writer = getattr(self._transport, "_io_writer", None)
        if not self._pending or not self.ready or (writer is not None and writer.transport.is_closing()):
            return
        if writer is None or writer.transport.get_write_buffer_size() or self._pending_data_size > DIRECT_BYTES:
            if self._flush_queue.empty():  # the flusher waits for the peer to read; what is sent meanwhile it writes as well
                self._flush_queue.put_nowait(_FLUSH_SIGNAL)
            return
        commands, self._pending, self._pending_data_size = self._pending, [], 0
        writer.transport.write(b"".join(commands))

    def send_or_drop(self, command: bytes) -> bool:
        """As `send`, for what may get lost: False if the connection is down or the peer has stopped reading."""
        if not self.ready or not self.has_room(again=False):
            return False
        self.send(command)
        return True

    def open_route(self, subject: str, handler: Handler, *, ephemeral: bool = False) -> int:
        """Subscribe; returns the number for `close_route`. A ``ephemeral`` one ends with the connection it was made on."""
        self._sid += 1
        identifier: int = self._sid
        self._handlers[identifier] = handler
        if ephemeral:
            self._ephemeral.add(identifier)
        else:
            self._subs[identifier] = Subscription(self, identifier, subject)
        if self.ready:
            self.send(subscribe_command(subject, identifier))
        return identifier

    def redirect_route(self, identifier: int, handler: Handler) -> None:
        """Stop the subscription at the server; what is still under way goes to ``handler`` until `close_route`."""
        if identifier in self._handlers:
            self._handlers[identifier] = handler
            self._unsubscribe(identifier)

    def close_route(self, identifier: int) -> None:
        """Unsubscribe; what is still under way is dropped."""
        if self._handlers.pop(identifier, None) is not None:
            self._unsubscribe(identifier)
            self._ephemeral.discard(identifier)

    def _unsubscribe(self, identifier: int) -> None:
        self._subs.pop(identifier, None)
        self.send_or_drop(unsubscribe_command(identifier))

    async def close_gracefully(self) -> None:
        """Close for good. What is still to be written is lost if the connection is down."""
        if not self.ready:
            self._drop_outgoing()
        try:
            await self.close()
        except OSError as error:
            log.debug("nats: connection failed during close; continuing: %s", error)

    def force_close(self) -> None:
        """End the connection at once, without waiting for a peer that may never read what is still to be written."""
        self._abort()
        for task in (self._reading_task, self._ping_interval_task, self._flusher_task, self._reconnection_task):
            if task is not None:
                task.cancel()

    def _abort(self) -> None:
        writer = getattr(self._transport, "_io_writer", None)
        if writer is not None:
            with suppress(AttributeError):  # asyncio's transports forget their loop once they are closed, and then stumble
                writer.transport.abort()

    def _drop_outgoing(self) -> None:
        self._pending.clear()
        self._pending_data_size = 0

    async def _process_msg(self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: bytes | None) -> None:
        self._dispatch(sid, subject, reply, data, headers)

    def _dispatch(self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: bytes | None) -> None:
        handler = self._handlers.get(sid)
        if handler is None:
            return
        try:
            handler(subject, reply, data, headers)
        except Exception as error:  # noqa: BLE001 - nats-py would log it and stop reading for good; the supervisor raises it instead
            self._on_crash(error)

    async def _process_pong(self) -> None:
        # A ping whose waiter was cancelled still gets its pong; setting a cancelled future would end the read loop.
        if self._pongs:
            waiter = self._pongs.pop(0)
            if not waiter.done():
                waiter.set_result(True)
            self._pings_outstanding = 0

    async def _process_err(self, err_msg: str) -> None:
        # nats-py closes for good on most errors; a server that shuts down or cuts a slow reader is worth coming back to.
        error = _server_error(err_msg)
        if "permissions violation" in err_msg:
            await self._error_cb(error)
        else:
            self._err = error
            await self._error_cb(error)
            await self._process_op_err(error)

    async def _connect_to_server(self, s: object) -> None:
        self._abort()  # an earlier attempt that got no greeting would leave its socket open
        await super()._connect_to_server(s)

    async def _attempt_reconnect(self) -> None:
        # What was meant for the old connection must not be written to the new one: pull requests on inboxes
        # without a reader would swallow messages. Publishes are sent again by their owner, lost acks mean redelivery.
        self._abort()
        self._drop_outgoing()
        for identifier in self._ephemeral:
            self._handlers.pop(identifier, None)
        self._ephemeral.clear()
        await super()._attempt_reconnect()


def _server_error(text: str) -> Exception:
    error: Exception = AuthorizationError() if "authorization violation" in text else Error(f"nats: {text}")
    return error
