"""Questions and answers over one wildcard inbox: every ack, reply and API answer of a connection arrives here.

A `PendingRequest` is one command that waits for its answer. Those that may be repeated are sent again when no answer comes, and
at once after a reconnect. One timer serves them all. Above it are the publisher, the API and the calls; below it the wire.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import anyio.lowlevel

from fleetbus.bus.nats.wire import Wire
from fleetbus.errors import BusClosed

Answer = tuple[bytes, bytes | None]
"""Payload and raw header block of an answer."""

RESEND_SECONDS = 2.0
"""After this long without an answer a repeatable command is sent again."""

RESEND_SECONDS_AFTER_RECONNECT = 0.5
"""The same for a command that a reconnect has just sent again: the server may still be coming up."""


ROOM_SECONDS = 0.25
"""After this long a command that found no room in the outgoing buffer is tried again, also one that is sent only once."""


class PendingRequest:
    """One command under way. ``resend_seconds`` 0 means that it is sent once."""

    __slots__ = ("command", "future", "give_up_at", "resend_at", "resend_seconds", "sent", "take")

    def __init__(self, command: bytes, future: asyncio.Future[Answer], resend_seconds: float, give_up_at: float) -> None:
        self.command = command
        self.future = future
        self.resend_seconds = resend_seconds
        self.resend_at = give_up_at
        self.give_up_at = give_up_at
        self.sent = False
        self.take: Callable[[bytes, bytes | None], bool] | None = None
        """For several answers: called with each one, returns True for the last."""


class RequestMux:
    """The table of what waits for an answer, by the last token of its reply subject."""

    def __init__(self, wire: Wire, inbox: str) -> None:
        self._wire = wire
        self._loop = asyncio.get_running_loop()
        self._prefix = f"{inbox}."
        self._skip = len(self._prefix)
        self._count = 0
        self._waiting: dict[bytes, PendingRequest] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._timer_due = float("inf")
        self._closed = False
        wire.open_route(self._prefix + "*", self._on_answer)

    @property
    def can_send(self) -> bool:
        """True while a command that is asked now is sent at once: the connection is up, and the server reads."""
        return self._wire.ready and self._wire.has_room(again=False)

    def new_reply(self) -> str:
        """A reply subject for one exchange."""
        self._count += 1
        return f"{self._prefix}{self._count:x}"

    async def ask(
        self,
        reply: str,
        command: bytes,
        *,
        timeout: float,
        resend_seconds: float = 0.0,
        take: Callable[[bytes, bytes | None], bool] | None = None,
    ) -> Answer:
        """Send ``command``, whose reply subject is ``reply``, and wait for the answer; raises `TimeoutError` or `BusClosed`.

        While the connection is down or the server reads nothing it waits to be sent, within the same ``timeout`` seconds.
        """
        if self._closed:
            await anyio.lowlevel.checkpoint_if_cancelled()  # the connection's own tasks end by their cancellation
            raise BusClosed("the connection is closed")
        now = self._loop.time()
        pending = PendingRequest(command, self._loop.create_future(), resend_seconds, now + timeout)
        pending.take = take
        token = reply[self._skip :].encode()
        self._waiting[token] = pending
        try:
            self._send(pending, now, resend_seconds)
            return await pending.future
        finally:
            del self._waiting[token]

    def resend_all(self) -> None:
        """After a reconnect: send again all that may be repeated or was never sent."""
        now = self._loop.time()
        for pending in self._waiting.values():
            if pending.resend_seconds or not pending.sent:
                self._send(pending, now, min(pending.resend_seconds, RESEND_SECONDS_AFTER_RECONNECT))

    def fail_forbidden(self, subject: str, error: Callable[[str], Exception]) -> bool:
        """The server forbids this subject (in small letters): end what was sent there with an error that names it as it is
        spelled. False if nothing waits for an answer from there."""
        found = False
        for pending in self._waiting.values():
            spelled = pending.command.split(b" ", 2)[1].decode()
            if spelled.lower() == subject and not pending.future.done():
                pending.future.set_exception(error(spelled))
                found = True
        return found

    def close(self) -> None:
        """End what still waits, here or in a task outside the connection's block, with `BusClosed`."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        for pending in self._waiting.values():
            if not pending.future.done():
                pending.future.set_exception(BusClosed("the connection was closed"))

    def _send(self, pending: PendingRequest, now: float, resend_seconds: float) -> None:
        if self._wire.ready and self._wire.has_room(again=pending.sent):
            self._wire.send(pending.command)
            pending.sent = True
        elif self._wire.ready and not pending.sent:
            resend_seconds = ROOM_SECONDS
        pending.resend_at = min(now + resend_seconds, pending.give_up_at) if resend_seconds else pending.give_up_at
        if pending.resend_at < self._timer_due:
            self._arm(pending.resend_at)

    def _arm(self, due: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer_due = due
        self._timer = self._loop.call_at(due, self._on_timer)

    def _on_timer(self) -> None:
        now = self._loop.time()
        self._timer = None
        self._timer_due = float("inf")
        for pending in self._waiting.values():
            if pending.future.done():
                continue
            if pending.give_up_at <= now:
                pending.future.set_exception(TimeoutError())
            elif pending.resend_at <= now:
                self._send(pending, now, pending.resend_seconds)
        due = min((each.resend_at for each in self._waiting.values() if not each.future.done()), default=None)
        if due is not None:
            self._arm(due)

    def _on_answer(self, subject: bytes, reply: bytes, payload: bytes, headers: bytes | None) -> None:
        pending = self._waiting.get(subject[self._skip :])
        if pending is None or pending.future.done():
            return
        if pending.take is None or pending.take(payload, headers):
            pending.future.set_result((payload, headers))
