"""The wire over a socket of its own: nats-py's client connects and keeps it, messages and commands pass it by.

Commands of several turns of the loop go into one system call. Incoming messages go straight to a plain function per
subscription.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import anyio

from fleetbus.bus.nats.nats_py import attach_transport
from fleetbus.bus.nats.socket_transport import SocketTransport
from fleetbus.bus.nats.wire import CLOSE_LIMIT_SECONDS, Callback, ErrorCallback, Wire

log = logging.getLogger(__name__)

FLUSH_BYTES = 64 << 10
"""So much is written without waiting for more."""

PIECE_BYTES = 1 << 20
"""Up to so many bytes are written in one piece; behind it the peer has to read on."""

FLUSH_TURNS = 8
"""Turns of the loop until what was sent is written, at most: what other tasks send meanwhile, and what arrived answers leads
to, goes into the same system call, and wakes the server once."""

QUIET_TURNS = 2
"""It is written after so many turns in which nothing more was sent: a single session need not wait for others."""


class TransportUnused(Exception):
    """nats-py has connected by a transport of its own."""


class SocketWire(Wire):
    """See `Wire`."""

    def __init__(self, on_crash: Callable[[Exception], None]) -> None:
        super().__init__(on_crash)
        self._loop = asyncio.get_running_loop()
        self._pending: list[bytes] = []
        self._pending_bytes = 0
        self._turns_to_flush = self._quiet_turns = self._size_seen = 0
        self._error_cb: ErrorCallback
        self._reconnected_cb: Callback
        self._transport = SocketTransport(self._dispatch, self._write, self._end, self._hear_error)
        attach_transport(self.client, self._transport)

    @property
    def unwritten_bytes(self) -> int:
        socket = self._transport.socket
        buffered = 0 if socket is None or socket.is_lost else socket.transport.get_write_buffer_size()
        return self._pending_bytes + buffered

    async def connect(
        self,
        servers: list[str],
        *,
        error_cb: ErrorCallback,
        disconnected_cb: Callback,
        reconnected_cb: Callback,
        closed_cb: Callback,
        **options: Any,
    ) -> None:
        self._error_cb, self._reconnected_cb = error_cb, reconnected_cb
        await self.client.connect(
            servers,
            error_cb=error_cb,
            disconnected_cb=disconnected_cb,
            reconnected_cb=self._hear_reconnected,
            closed_cb=closed_cb,
            **options,
        )
        if self._transport.socket is None:
            raise TransportUnused
        self._begin()

    def send(self, command: bytes) -> None:
        self._pending.append(command)
        self._pending_bytes += len(command)
        if not self._turns_to_flush:
            self._turns_to_flush = FLUSH_TURNS
            self._loop.call_soon(self._flush)

    async def force_reconnect(self) -> None:
        self._end()
        self._transport.abort()
        await self.client.force_reconnect()

    async def close(self) -> None:
        self._write()
        self._end()
        with anyio.move_on_after(CLOSE_LIMIT_SECONDS):
            try:
                await self.client.close()
            except (AssertionError, OSError) as error:  # the first: nats-py, where it never chose a server
                log.debug("nats: connection failed during close; continuing: %s", error)
        self._transport.abort()

    def _flush(self) -> None:
        """Write what waits here once its turns are over."""
        self._turns_to_flush -= 1
        self._quiet_turns = self._quiet_turns + 1 if self._pending_bytes == self._size_seen else 0
        self._size_seen = self._pending_bytes
        if self._turns_to_flush and self._quiet_turns < QUIET_TURNS and self._pending_bytes <= FLUSH_BYTES:
            self._loop.call_soon(self._flush)
            return
        self._turns_to_flush = self._quiet_turns = self._size_seen = 0
        self._write()

    def _write(self) -> None:
        """Write what waits, as long as the peer reads; the socket calls this again when it has read."""
        socket = self._transport.socket
        while self._pending and self.ready and socket is not None and not (socket.is_paused or socket.is_lost):
            commands, self._pending = _split(self._pending, self._pending_bytes)
            piece = b"".join(commands)
            self._pending_bytes -= len(piece)
            socket.transport.write(piece)

    def _drop_outgoing(self) -> None:
        self._pending.clear()
        self._pending_bytes = 0

    async def _hear_error(self, error: Exception) -> None:
        await self._error_cb(error)

    async def _hear_reconnected(self) -> None:
        self._begin()
        await self._reconnected_cb()


def _split(commands: list[bytes], size: int) -> tuple[list[bytes], list[bytes]]:
    """The commands of the next piece, and the others."""
    if size <= PIECE_BYTES:
        return commands, []
    count = total = 0
    while not count or (count < len(commands) and total + len(commands[count]) <= PIECE_BYTES):
        total += len(commands[count])
        count += 1
    return commands[:count], commands[count:]
