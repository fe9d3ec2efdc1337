"""The connection to a server as the parts of the bus know it: commands out, messages to plain functions, and its state.

Two implementations: `SocketWire` writes to a socket of its own, `ClientWire` goes by nats-py's public calls. Sending never
waits here: a command joins the outgoing buffer and is written soon after, in order, so there is nothing to cancel. nats-py
keeps the connection itself: TLS, keys, the list of servers, the first words.
"""

from __future__ import annotations

import abc
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from nats.aio.client import Client

from fleetbus.bus.nats.protocol import subscribe_command, unsubscribe_command

log = logging.getLogger(__name__)

Handler = Callable[[bytes, bytes, bytes, bytes | None], None]
"""Called with subject, reply subject, payload and raw header block of one message; must not block and must not raise."""

Callback = Callable[[], Awaitable[None]]
ErrorCallback = Callable[[Exception], Awaitable[None]]

MAX_BUFFERED_BYTES = 32 << 20
"""Outgoing bytes beyond which acks and core messages are dropped, and nothing else is sent: the peer has stopped reading."""

STALLED_BYTES = 1 << 20

CLOSE_LIMIT_SECONDS = 1.0


class Wire(abc.ABC):
    """One connection that comes back by itself. ``ready`` is True while commands that are sent now can reach the server;
    ``client`` is nats-py's. ``on_crash`` hears of an exception that a handler raised, which is a bug in this package."""

    def __init__(self, on_crash: Callable[[Exception], None]) -> None:
        self.ready = False
        self.client = Client()
        self._on_crash = on_crash
        self._numbers = 0
        self._handlers: dict[int, Handler] = {}
        self._subjects: dict[int, str] = {}
        """Of the routes that are opened again on the next connection."""

    @property
    def max_payload(self) -> Any:
        """The most bytes that a message may have, with its headers, as the server says."""
        return self.client.max_payload

    @property
    def server_version(self) -> tuple[int, int]:
        """Major and minor version of the server; raises `ValueError` or `TypeError` if it says none."""
        version = self.client.connected_server_version
        return int(version.major), int(version.minor)

    @property
    @abc.abstractmethod
    def unwritten_bytes(self) -> int:
        """Bytes that wait for the peer to read."""

    @abc.abstractmethod
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
        """Connect to one of the servers, trying them without end; the rest is as ``nats.aio.client.Client`` takes it."""

    @abc.abstractmethod
    def send(self, command: bytes) -> None:
        """Queue a command for the server; call it only while `ready`."""

    @abc.abstractmethod
    async def force_reconnect(self) -> None:
        """Leave a connection that brings nothing back, and make another."""

    @abc.abstractmethod
    async def close(self) -> None:
        """Close for good, within `CLOSE_LIMIT_SECONDS`, whatever the peer does; what is still to be written may be lost."""

    def has_room(self, *, again: bool) -> bool:
        """False while so much waits to be written that more would only add to it, or, sooner, what was sent before."""
        return self.unwritten_bytes <= (STALLED_BYTES if again else MAX_BUFFERED_BYTES)

    def send_or_drop(self, command: bytes) -> bool:
        """As `send`, for what may get lost: False if the connection is down or the peer has stopped reading."""
        if not self.ready or not self.has_room(again=False):
            return False
        self.send(command)
        return True

    def open_route(self, subject: str, handler: Handler, *, ephemeral: bool = False) -> int:
        """Subscribe; returns the number for `close_route`. A ``ephemeral`` one ends with the connection it was made on."""
        self._numbers += 1
        identifier = self._numbers
        self._handlers[identifier] = handler
        if not ephemeral:
            self._subjects[identifier] = subject
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

    def _unsubscribe(self, identifier: int) -> None:
        self._subjects.pop(identifier, None)
        self.send_or_drop(unsubscribe_command(identifier))

    def _begin(self) -> None:
        """A connection is there: subscribe to what outlives connections."""
        self.ready = True
        for identifier, subject in self._subjects.items():
            self.send(subscribe_command(subject, identifier))

    def _end(self) -> None:
        """The connection is gone, and what was made for it alone with it: pull requests on inboxes without a reader would
        swallow messages. Publishes are sent again by their owner, lost acks mean redelivery."""
        self.ready = False
        self._drop_outgoing()
        self._handlers = {key: handler for key, handler in self._handlers.items() if key in self._subjects}

    @abc.abstractmethod
    def _drop_outgoing(self) -> None: ...

    def _dispatch(self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: bytes | None) -> None:
        handler = self._handlers.get(sid)
        if handler is None:
            return
        try:
            handler(subject, reply, data, headers)
        except Exception as error:  # noqa: BLE001 - a bug here: the reading task would end; the supervisor raises it instead
            self._on_crash(error)
