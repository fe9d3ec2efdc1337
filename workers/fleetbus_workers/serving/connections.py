"""HTTP/1.1 connections with time limits for requests and answers; slower ones are aborted.

uvicorn's protocol with the three limits that it has not: a request's head has to be complete after ``head_seconds``, an answer
has to be taken within ``send_seconds``, and where all places are taken the connection that has waited longest without a request
makes room for the newcomer. Bodies are read by the applications (`request_body`); what is no HTTP, and heads beyond 64 KiB,
are refused by h11. `docs/decisions/0091` says why not another server. Above it are the gateways and the
monitor's page.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from typing import Any, ClassVar, cast

import msgspec

JOINED_BYTES = 64 << 10
"""More than this is written at once."""


class Bounds(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of one server; ``connections`` counts WebSockets too."""

    head_seconds: float = 20.0
    send_seconds: float = 60.0
    connections: int = 4096


class _JoinedWrites:
    """A transport that writes what a turn of the loop gave it at once: uvicorn writes head and body of an answer one by one,
    each a system call that wakes the client."""

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._parts: list[bytes] = []
        self._size = 0

    def __getattr__(self, name: str) -> object:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        if not self._parts:
            self._loop.call_soon(self.flush)
        self._parts.append(data)
        self._size += len(data)
        if self._size > JOINED_BYTES:  # whether the client takes it has to show while the application writes
            self.flush()

    def flush(self) -> None:
        if self._parts and not self._transport.is_closing():
            self._transport.write(b"".join(self._parts))
        self._parts.clear()
        self._size = 0

    def close(self) -> None:
        self.flush()
        self._transport.close()

    def release(self) -> asyncio.Transport:
        """The transport itself, for a protocol that follows this one."""
        self.flush()
        return self._transport


class BoundedProtocol(asyncio.Protocol):
    """One connection, before one of uvicorn's protocols in the order of inheritance. ``waiting`` holds all that have no request
    in work, longest first; it is the server's."""

    bounds: ClassVar[Bounds]
    waiting: ClassVar[OrderedDict[BoundedProtocol, None]]
    connections: set[Any]
    cycle: Any
    loop: asyncio.AbstractEventLoop
    transport: Any

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.transport = _JoinedWrites(cast("asyncio.Transport", transport), self.loop)
        self._head: asyncio.TimerHandle | None = None
        self._send: asyncio.TimerHandle | None = None
        while len(self.connections) > self.bounds.connections - 1 and self.waiting:
            next(iter(self.waiting)).abort_connection()
        self._mark_waiting()
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._unmark_waiting()
        self._disarm_send()
        self._unset_keepalive_if_required()  # type: ignore[attr-defined]

    def data_received(self, data: bytes) -> None:
        before = self.cycle
        super().data_received(data)
        if self.transport.get_protocol() is not self or self.transport.is_closing():
            return
        if self.cycle is not before:
            self._unmark_waiting()
        elif self._between_requests():
            self._disarm_head()
        elif self.cycle is None or self.cycle.response_complete:
            self._expect_head()

    def handle_websocket_upgrade(self, *event: object) -> None:
        self._unmark_waiting()
        self.transport = self.transport.release()
        super().handle_websocket_upgrade(*event)  # type: ignore[misc]

    def on_response_complete(self) -> None:
        super().on_response_complete()  # type: ignore[misc]
        if self.cycle.response_complete and not self.transport.is_closing():
            self._mark_waiting()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._send = self.loop.call_later(self.bounds.send_seconds, self.abort_connection)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._disarm_send()

    def abort_connection(self) -> None:
        """End the connection at once, with all that is under way."""
        self._unmark_waiting()
        self.connections.discard(self)
        self.transport.abort()

    def _between_requests(self) -> bool:
        """True if a request was read to its end, and nothing after it."""
        raise NotImplementedError

    def _mark_waiting(self) -> None:
        self.waiting[self] = None
        self.waiting.move_to_end(self)

    def _unmark_waiting(self) -> None:
        self.waiting.pop(self, None)
        self._disarm_head()

    def _expect_head(self) -> None:
        """The limit counts from the first byte, or from the connection's beginning; more bytes do not prolong it."""
        if self._head is None:
            self._head = self.loop.call_later(self.bounds.head_seconds, self.abort_connection)

    def _disarm_head(self) -> None:
        if self._head is not None:
            self._head.cancel()
            self._head = None

    def _disarm_send(self) -> None:
        if self._send is not None:
            self._send.cancel()
            self._send = None
