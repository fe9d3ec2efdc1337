"""Storing messages: the hottest path of the system. One message, one ack, at most a window of them under way.

The ack comes back through the connection's one inbox, so a publish costs no subscription, and it is sent again under the same
id until it is answered. Above it is the bus; below it the exchange.
"""

from __future__ import annotations

import asyncio
import re
import secrets
from collections import OrderedDict, deque
from collections.abc import Iterable

import anyio
import msgspec

from fleetbus.bus.base import STORES_NOTHING, PublishAck, StreamEntry, check_literal
from fleetbus.bus.nats.api import PASSING, build_publish_error
from fleetbus.bus.nats.connection import Connection
from fleetbus.bus.nats.protocol import NO_RESPONDERS, check_subject, header_block, publish_with_headers_command, status_of
from fleetbus.bus.nats.request_mux import RESEND_SECONDS, Answer
from fleetbus.errors import BusError, PublishUnanswered

REMEMBERED = 4096
"""Most subjects remembered; the least recently updated one is dropped first."""


class Positions:
    """The highest known position of each subject."""

    def __init__(self) -> None:
        self._known: OrderedDict[str, int] = OrderedDict()

    def note(self, subject: str, sequence: int) -> None:
        """An entry at this position stands on the subject."""
        self._known[subject] = max(sequence, self._known.pop(subject, 0))
        if len(self._known) > REMEMBERED:
            self._known.popitem(last=False)

    def is_behind(self, subjects: Iterable[str], found: Iterable[StreamEntry]) -> bool:
        """True if entries were read of these literal subjects that end before what is known to stand there."""
        expected = {subject: self._known[subject] for subject in subjects if subject in self._known}
        if not expected:
            return False
        last = {entry.subject: entry.sequence for entry in found}
        return any(last.get(subject, 0) < sequence for subject, sequence in expected.items())


class Stored(msgspec.Struct, frozen=True):
    """An entry that this connection stored, and the server acked."""

    subject: str
    payload: bytes
    sequence: int


NOTHING_STORED = Stored("", b"", 0)


class PublishWindow:
    """A counter with a queue. 1,000 unanswered publishes of one worker make those of all others 60 times slower."""

    def __init__(self, places: int, size_bytes: int) -> None:
        self._places = places
        self._bytes = size_bytes
        self._waiting: deque[tuple[asyncio.Future[None], int]] = deque()

    def try_acquire(self, size: int) -> bool:
        """Acquire room if no publish is waiting; a message larger than the window is admitted to an empty one."""
        if self._waiting or self._places <= 0 or self._bytes <= 0:
            return False
        self._take(size)
        return True

    async def acquire(self, size: int, timeout: float) -> None:
        """Wait for a place; raises `TimeoutError`. Cancelling gives the place back."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((future, size))
        try:
            with anyio.fail_after(timeout):
                await future
        except BaseException:
            if future.done() and not future.cancelled():
                self.release(size)
            else:
                future.cancel()
                self._admit()
            raise

    def release(self, size: int) -> None:
        self._places += 1
        self._bytes += size
        self._admit()

    def _take(self, size: int) -> None:
        self._places -= 1
        self._bytes -= size

    def _admit(self) -> None:
        while self._waiting and (self._waiting[0][0].done() or (self._places > 0 and self._bytes > 0)):
            future, size = self._waiting.popleft()
            if not future.done():
                self._take(size)
                future.set_result(None)


OUTSTANDING_PUBLISHES = 256
OUTSTANDING_BYTES = 32 << 20

_PAUSE_SECONDS = 0.25
_UNKNOWN_TRIES = 3
"""A stream that is missing may be electing its leader, which takes up to 9 s: one that this connection has heard of is waited
for as long as the caller waits, another one for so many tries."""


NOBODY_STORES = ": no server stores it now: its stream has no leader, or the link of a leaf node is down"

SILENT_SECONDS = 10.0
"""Longer than a cluster takes to choose the leader of a stream."""

SILENCE_KNOWN_SECONDS = 45.0
"""So long after a publish that ran into its time limit nothing is known any more: they are repeated sooner."""

ANSWERS_SECONDS = 6.0
"""A server that answered a round trip within this is there."""

_STANDING = re.compile(r"wrong last sequence: (\d+)")
"""The server's words for a refused compare-and-set: the position of what stands there."""


class _Refusal(msgspec.Struct):
    err_code: int = 0
    description: str = ""


class _Ack(msgspec.Struct):
    seq: int = 0
    duplicate: bool = False
    error: _Refusal | None = None


_decode = msgspec.json.Decoder(_Ack).decode


class Publisher:
    """Publishes to the streams of one connection."""

    def __init__(self, connection: Connection, positions: Positions) -> None:
        self._positions = positions
        self._connection = connection
        self._request_mux = connection.request_mux
        self._wire = connection.wire
        self._window = PublishWindow(OUTSTANDING_PUBLISHES, OUTSTANDING_BYTES)
        self._known: dict[str, Stored] = {}
        """By the first token of its subjects, of each stream that was heard of what was stored there last."""
        self._silent: dict[str, tuple[float, float]] = {}
        """By the same token: when the first publish was sent and the last one given up of those in a row that got no ack."""
        self._own_id = secrets.token_hex(6)
        self._count = 0
        self._now = asyncio.get_running_loop().time

    def mark_stream_known(self, subject: str) -> None:
        """The stream of this subject was heard of: if there is no leader now, it is electing its leader."""
        self._known.setdefault(_parse_prefix(subject), NOTHING_STORED)

    def get_last_stored(self, subject: str) -> Stored:
        """The last entry that this connection stored in the stream of this subject."""
        return self._known.get(_parse_prefix(subject), NOTHING_STORED)

    @property
    def storing_problem(self) -> str:
        """See `fleetbus.bus.base.LogBus`."""
        now = self._now()
        silent = any(
            now - since >= SILENT_SECONDS and now - last < SILENCE_KNOWN_SECONDS for since, last in self._silent.values()
        )
        return STORES_NOTHING if silent and self._is_answered() else ""

    async def publish(
        self, subject: str, payload: bytes, *, message_id: str | None, expected_last: int | None, timeout: float
    ) -> PublishAck:
        """See `fleetbus.bus.base.Bus.publish`."""
        check_literal(check_subject(subject))
        headers = header_block(message_id or self._new_id(), expected_last)
        before = self.get_last_stored(subject)
        size = len(headers) + len(payload)
        if size > self._wire.max_payload:  # sent, it would cost the connection
            raise BusError(f"{subject}: {size} bytes with headers exceed the server's limit of {self._wire.max_payload}")
        if not self._window.try_acquire(size):
            try:
                await self._window.acquire(size, timeout)
            except TimeoutError:
                raise PublishUnanswered(f"{subject}: no place among the unanswered publishes for {timeout:g} s") from None
        try:
            answer, status = await self._send(subject, headers, payload, timeout)
        finally:
            self._window.release(size)
        if status_of(status) == NO_RESPONDERS:
            raise BusError(f"{subject}: no stream stores this subject; create the run first (fleetbus init)")
        ack = _decode(answer)
        if self._silent:
            self._silent.pop(_parse_prefix(subject), None)
        if ack.error is not None:
            standing = _STANDING.search(ack.error.description)
            last = int(standing[1]) if standing is not None else None
            if last is not None:
                self._positions.note(subject, last)
            raise build_publish_error(subject, expected_last, ack.error.err_code, ack.error.description, last)
        self._positions.note(subject, ack.seq)
        if ack.seq > self.get_last_stored(subject).sequence:
            self._known[_parse_prefix(subject)] = Stored(subject, payload, ack.seq)
        elif ack.seq <= before.sequence and not ack.duplicate:  # its position was taken when this was sent
            self._connection.report_lost(before.subject, before.sequence)
        return PublishAck(sequence=ack.seq, duplicate=ack.duplicate)

    async def _send(self, subject: str, headers: bytes, payload: bytes, timeout: float) -> Answer:
        reply = self._request_mux.new_reply()
        command = publish_with_headers_command(subject, reply, headers, payload)
        begun = self._now()
        give_up_at = begun + timeout
        tries = 0
        try:
            while True:
                answer = await self._request_mux.ask(
                    reply, command, timeout=give_up_at - self._now(), resend_seconds=RESEND_SECONDS
                )
                if status_of(answer[1]) != NO_RESPONDERS:
                    if b'"error"' not in answer[0] or not _is_passing(answer[0]):
                        return answer
                    await anyio.sleep(_PAUSE_SECONDS)
                    continue
                tries += 1
                if tries == _UNKNOWN_TRIES and _parse_prefix(subject) not in self._known:
                    return answer
                await anyio.sleep(_PAUSE_SECONDS)
        except TimeoutError:
            why = NOBODY_STORES if tries else self._note_silence(subject, begun)
            raise PublishUnanswered(f"{subject}: no ack within {timeout:g} s{why}") from None

    def _note_silence(self, subject: str, begun: float) -> str:
        """Take note of a publish that got no answer at all; the words for it, empty if there is nothing to say."""
        prefix, now = _parse_prefix(subject), self._now()
        since, last = self._silent.get(prefix, (begun, begun))
        self._silent[prefix] = (since if begun - last < SILENCE_KNOWN_SECONDS else begun, now)
        return f": {STORES_NOTHING}" if self._is_answered() and now - begun >= SILENT_SECONDS else ""

    def _is_answered(self) -> bool:
        return self._now() - self._connection.answered_at < ANSWERS_SECONDS

    def _new_id(self) -> str:
        self._count += 1
        return f"{self._own_id}-{self._count:x}"


def _is_passing(answer: bytes) -> bool:
    error = _decode(answer).error
    return error is not None and error.err_code in PASSING


def _parse_prefix(subject: str) -> str:
    """The first token: one stream of a run stores all subjects that begin with it."""
    return subject.partition(".")[0]
