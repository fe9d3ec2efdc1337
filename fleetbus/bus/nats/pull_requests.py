"""Pull requests to one consumer: how many messages the server may still send here, and on which inbox.

Every credit is in one of two places: wanted (not yet asked for) or asked (at the server). A delivery uses one up; a status
gives unused ones back to be asked for again. A reconnect or a silence of the server means a new inbox, so that no request of
before can deliver beyond the credits. Above it are puller and reader; below it the connection.

From time to time one asks on a new inbox without either, and some seconds later takes back what was asked on the one before and
was neither delivered nor given back: where a leaf node lies between, requests are lost without a reconnect here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

import msgspec

from fleetbus.bus.nats.connection import Connection
from fleetbus.bus.nats.protocol import header_fields, publish_command, status_of, status_text
from fleetbus.bus.nats.wire import Handler

EXPIRES_SECONDS = 3.0
"""A pull request ends after this, and is made again: what comes due while a puller is stopped goes to others soon.

So the server answers at least this often, and owes no heartbeats: an idle puller costs two small messages in 3 s.
"""

SILENCE_SECONDS = 6.0
"""Without message or status for this long, the pull requests are taken for lost."""

RENEW_SECONDS = 30.0
"""The age at which an inbox is replaced, so that at most so much and `SILENCE_SECONDS` later every lost credit is back."""

_BACKOFF_SECONDS = 0.25
_FORGET_SECONDS = 2 * EXPIRES_SECONDS
"""By then the server has answered a request or filled it; of one that it filled it says nothing."""

_encode = msgspec.json.Encoder().encode

OnMessage = Callable[[bytes, bytes, bytes], None]
"""Called with subject, ack subject and payload."""

OnTrouble = Callable[[str], None]
"""Called with the server's words when the consumer is missing, deleted, or refuses to be pulled from."""


class PullRequests:
    """The credits of one puller at one consumer. `attach` begins; everything is synchronous. A message beyond the credits goes
    back to a consumer that ``acks``; without acks it is trouble, for the server will not send it again."""

    def __init__(self, connection: Connection, on_message: OnMessage, on_trouble: OnTrouble, *, acks: bool) -> None:
        self._connection = connection
        self._wire = connection.wire
        self._loop = asyncio.get_running_loop()
        self._on_message = on_message
        self._on_trouble = on_trouble
        self._acks = acks
        self._subject = ""
        self._route = 0
        self._inbox = ""
        self._requests: dict[bytes, tuple[int, float]] = {}
        self._count = 0
        self._planned: asyncio.Handle | None = None
        self._attached_at = 0.0
        self._route_before = 0
        self._asked_before = 0
        """Of ``asked`` what was asked on the inbox before this one."""
        self._ending: asyncio.TimerHandle | None = None
        self._closed = False
        self.wanted = 0
        self.asked = 0
        self.heard_at = 0.0

    def attach(self, stream: str, consumer: str) -> None:
        """Pull from this consumer on a new inbox; all unused credits are asked for again.

        Does nothing once closed: the caller may have waited for the server while its owner left.
        """
        self.detach()
        if self._closed:
            return
        self._subject = f"{self._connection.api.prefix}.CONSUMER.MSG.NEXT.{stream}.{consumer}"
        self._open_inbox()
        self._plan()

    def _open_inbox(self) -> None:
        self._inbox, self._attached_at = self._connection.new_inbox(), self._loop.time()
        self._route = self._wire.open_route(f"{self._inbox}.*", partial(self._on_inbox, self._inbox), ephemeral=True)

    def _renew_inbox(self) -> None:
        """Ask on a new inbox from now on; requests on the one before end within their time, or are lost."""
        self._route_before, self._asked_before = self._route, self.asked
        self._open_inbox()
        self._ending = self._loop.call_later(SILENCE_SECONDS, self._close_before)

    def _close_before(self) -> None:
        if self._ending is not None:
            self._ending.cancel()
        if self._route_before:
            self._wire.close_route(self._route_before)
        lost, self._asked_before, self._route_before, self._ending = self._asked_before, 0, 0, None
        self.asked -= lost
        self.wanted += lost
        self._plan()

    def detach(self, late: Handler | None = None) -> int:
        """Take all credits back; the server drops the pull requests with the inbox.

        What is still under way goes to ``late`` until the returned route is closed.
        """
        route, self._route = self._route, 0
        self._close_before()
        self.wanted += self.asked
        self.asked = 0
        self._requests.clear()
        if self._planned is not None:
            self._planned.cancel()
            self._planned = None
        if late is not None:
            self._wire.redirect_route(route, late)
            return route
        self._wire.close_route(route)
        return 0

    def close(self, late: Handler | None = None) -> int:
        """As `detach`, for good."""
        self._closed = True
        return self.detach(late)

    def add(self, credits: int) -> None:
        """Allow that many more messages; grants of one turn of the loop become one request."""
        self.wanted += credits
        self._plan()

    def is_silent(self) -> bool:
        """True if the server owes a status for too long."""
        return self._route > 0 and self.asked > 0 and self._loop.time() - self.heard_at > SILENCE_SECONDS

    def _plan(self, delay_seconds: float = 0.0) -> None:
        # Few large requests instead of many small ones: a server keeps a limited number per consumer and answers each.
        if self._planned is not None or not self._route or not self.wanted or self.wanted * 4 < self.asked:
            return
        if delay_seconds:
            self._planned = self._loop.call_later(delay_seconds, self._request)
        else:
            self._planned = self._loop.call_soon(self._request)

    def _request(self) -> None:
        self._planned = None
        if not self._route or not self.wanted or not self._wire.ready:
            return
        if self._ending is None and self._loop.time() - self._attached_at >= RENEW_SECONDS:
            self._renew_inbox()
        self._count += 1
        batch, self.wanted = self.wanted, 0
        self.asked += batch
        self.heard_at = self._loop.time()
        self._forget_filled(self.heard_at - _FORGET_SECONDS)
        self._requests[b"%x" % self._count] = (batch, self.heard_at)
        nanoseconds = 1_000_000_000
        question = {"batch": batch, "expires": int(EXPIRES_SECONDS * nanoseconds)}
        self._wire.send(publish_command(self._subject, f"{self._inbox}.{self._count:x}", _encode(question)))

    def _forget_filled(self, before: float) -> None:
        while self._requests:
            oldest = next(iter(self._requests))
            if self._requests[oldest][1] >= before:
                return
            del self._requests[oldest]

    def _on_inbox(self, inbox: str, subject: bytes, reply: bytes, payload: bytes, headers: bytes | None) -> None:
        asked = self.asked
        self._on_wire(subject, reply, payload, headers)
        if inbox != self._inbox:
            self._asked_before -= min(asked - self.asked, self._asked_before)

    def _on_wire(self, subject: bytes, reply: bytes, payload: bytes, headers: bytes | None) -> None:
        self.heard_at = self._loop.time()
        if not reply and headers:
            self._on_status(subject.rpartition(b".")[2], headers)
            return
        if self.asked <= 0:
            if self._acks:
                self._wire.send_or_drop(publish_command(reply.decode(), "", b"-NAK"))
            else:
                self._on_trouble("more messages than asked for")
            return
        self.asked -= 1
        if not self.asked:
            self._requests.clear()
        if self.wanted:
            self._plan()
        self._on_message(subject, reply, payload)

    def _on_status(self, request: bytes, headers: bytes) -> None:
        status = status_of(headers)
        batch, _ = self._requests.pop(request, (0, 0.0))
        unused = int(header_fields(headers).get("Nats-Pending-Messages", batch))
        unused = min(unused, self.asked)
        self.asked -= unused
        self.wanted += unused
        text = status_text(headers)
        if status == 503 or (status == 409 and ("Consumer" in text or "consumer" in text)):
            self._on_trouble(text)
        elif status in (404, 408):
            self._plan()
        else:
            self._plan(_BACKOFF_SECONDS)
