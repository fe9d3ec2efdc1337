"""The bus as workers see it: protocols of the log, of work and of calls, over NATS (`fleetbus.bus.nats`) and in memory.

Above it are the workers; below it one connection. The contract suite (``tests/contract/test_bus_*.py``) holds all
implementations to the promises written here. Anything sent may be delivered again, and an unanswered publish may have been
stored: callers rely on compare-and-set, never on the duplicate window.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Protocol

import msgspec

from fleetbus.bus.objects import ObjectStore
from fleetbus.bus.streams import RunPlan
from fleetbus.errors import BusError

STORES_NOTHING = "the NATS server answers and stores nothing: its disk may be full, see its log or /healthz"
"""What a publisher can say of a server that leaves it without acks; the server does not say so itself."""


def check_literal(subject: str) -> None:
    """Raise `BusError` for a subject that nothing is published on: a server stores a wildcard as it stands."""
    is_odd = "*" in subject or ">" in subject or ".." in subject or subject[:1] in ("", ".") or subject[-1] == "."
    if is_odd and {"", "*", ">"} & set(subject.split(".")):
        raise BusError(f"subject {subject!r} has a wildcard or an empty token: nothing is published there")


class StreamEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of a stream. ``time_ns`` is the server's clock (Unix nanoseconds) when it was stored."""

    subject: str
    payload: bytes
    sequence: int
    time_ns: int


FORGOTTEN = StreamEntry(subject="", payload=b"", sequence=0, time_ns=0)
"""The message of a delivery that was asked to forget it."""


class PublishAck(msgspec.Struct, frozen=True, kw_only=True):
    """The stream's acknowledgement; ``duplicate`` means that the message id was seen before and nothing new was stored."""

    sequence: int
    duplicate: bool = False


class Delivery(Protocol):
    """One message from a durable consumer. It comes again after the consumer's ``ack_wait`` unless acked or extended.

    `ack`, `nak` and `extend` are sent, not confirmed: a server that is killed may forget them. They never raise when the
    connection is down (redelivery covers it), and cancellation does not interrupt them.
    """

    @property
    def message(self) -> StreamEntry: ...
    @property
    def delivered(self) -> int:
        """Number of its deliveries, 1 the first time; a killed server may count from 1 again."""

    async def ack(self) -> None: ...
    async def nak(self, delay_seconds: float = 0.0) -> None: ...
    async def extend(self) -> None: ...
    def forget_message(self) -> None:
        """Keep no copy of what was read, if there is one: a delivery is held for as long as its work takes."""


class Subscription(Protocol):
    """A continuous pull from one durable consumer, limited by credits: never more deliveries than were granted.

    After a reconnect the remaining credits are asked for again on a new inbox. Receive from one task only.
    """

    @property
    def credits(self) -> int:
        """Credits granted and not yet used by a delivery."""

    def grant(self, credits: int = 1) -> None:
        """Allow that many more deliveries; returns at once."""

    async def receive(self) -> Delivery:
        """The next delivery; waits without limit. Cancelling it loses nothing."""


class Reader(Protocol):
    """Entries of the log in order of sequence, without gaps or repeats, following it live across reconnects."""

    async def receive(self) -> StreamEntry:
        """The next matching entry; waits without limit. Cancelling it loses nothing."""


class Request(Protocol):
    """A call from `Bus.request`, waiting for its answer."""

    @property
    def subject(self) -> str: ...
    @property
    def payload(self) -> bytes: ...
    async def respond(self, payload: bytes) -> None: ...


class RequestServer(Protocol):
    """Requests for one subject, in order of arrival; at most ``limit`` wait, further ones get no answer."""

    async def receive(self) -> Request: ...


class Listener(Protocol):
    """Core messages. When more than ``limit`` wait, the oldest are dropped and counted in `dropped`."""

    dropped: int

    async def receive(self) -> tuple[str, bytes]:
        """Subject and payload of the next message."""


class ConsumerFloor(msgspec.Struct, frozen=True, kw_only=True):
    """The progress of a durable consumer: everything of its ``filter`` up to ``ack_floor`` is acked. What is un-acked may begin
    far behind that floor, which stands still while the consumer is idle."""

    name: str
    filter: str
    ack_floor: int


class LogState(msgspec.Struct, frozen=True, kw_only=True):
    """Numbers of the log at one moment.

    ``first_sequence`` is behind ``last_sequence`` where the log is empty; that is the sequence of the last entry ever stored,
    0 when there was none. ``entries`` of ``used_bytes`` together are left, and may grow to ``limit_bytes`` (0: no limit).
    Message ids are remembered for ``duplicate_window_seconds``. ``created`` is when the stream was made: another time means
    another log. ``erasing`` are limits by which the server removes entries that nobody has settled. ``begins`` is the
    sequence that its first entry ever got: not 1 for a log that was restored from what was left of another. ``unacked`` is how
    many messages of the durable consumers that were asked about, delivered or not, nobody has acked: 0 without any, and where
    this user may not ask.
    """

    first_sequence: int
    last_sequence: int
    entries: int
    used_bytes: int
    limit_bytes: int
    duplicate_window_seconds: float
    created: str
    erasing: tuple[str, ...] = ()
    begins: int = 1
    unacked: int = 0


class LogBus(Protocol):
    """The log: what is stored, read back, followed, removed, its numbers, and large files beside it."""

    @property
    def storing_problem(self) -> str:
        """`STORES_NOTHING` while that is so, as far as what this connection publishes can tell; else empty."""

    @property
    def own_key(self) -> str:
        """The public key by which the server knows this connection; empty where it asks for none."""

    def now_ns(self) -> int:
        """The server's clock in Unix nanoseconds, as far as it can be known here (monotonic between corrections)."""

    async def publish(
        self,
        subject: str,
        payload: bytes,
        *,
        message_id: str | None = None,
        expected_last: int | None = None,
        timeout: float = 30.0,
    ) -> PublishAck:
        """Store a message and wait for the stream's ack, sending it again under the same id until ``timeout`` seconds.

        ``expected_last`` is the sequence that must be the last one on this very subject (0: none yet).
        Raises `SequenceConflict`, `LogFull` or `PublishUnanswered`. After a resend a conflict may be one's own first try.
        """

    def read(self, subjects: Sequence[str], *, start: int = 1) -> AbstractAsyncContextManager[Reader]:
        """Follow the log from sequence ``start`` on, filtered by subjects (wildcards allowed), without acking anything."""

    def scan(self, subjects: Sequence[str], *, start: int = 1) -> AsyncIterator[StreamEntry]:
        """As `read`, but ends at what was the end of the log when it was called."""

    async def last(self, subject: str) -> StreamEntry | None:
        """The last entry on one literal subject of any stream of the run, or None. Like `history` it sees what this connection
        has stored on the subject, and what a compare-and-set of its own was refused for."""

    async def last_of_each(self, subjects: Sequence[str]) -> list[StreamEntry]:
        """The last entries on literal subjects of the log, all as of one state of it; subjects without entries are missing."""

    async def list_subjects(self, subject: str) -> list[str]:
        """The subjects of the log that match one with wildcards and have entries, in no order."""

    async def history(self, subjects: Sequence[str]) -> list[StreamEntry]:
        """All entries on the given literal subjects, merged by sequence (batched direct gets)."""

    async def next_entry(self, subject: str, *, start: int) -> StreamEntry | None:
        """The first entry of the log with a sequence of ``start`` or more on a subject (wildcards allowed), or None."""

    async def log_state(self, consumers: Sequence[str] = ()) -> LogState:
        """The numbers of the log, and of the durable consumers of these names how much is before them."""

    async def purge(self, subject: str, *, below: int) -> None:
        """Remove the log's entries on a subject (wildcards allowed) with a sequence below this one, even if a consumer still
        needs them. It is asked once and never after the connection was down: a server that comes back may hold an older log,
        in which other entries have these sequences. Raises `RequestUnanswered` then, and may have removed them or not."""

    def objects(self, bucket: str) -> ObjectStore | None:
        """Large files beside the log; None where nothing stores any, as in memory."""


class WorkBus(Protocol):
    """Work that is leased from durable consumers of the log until it is acked."""

    def pull(self, consumer: str, *, credits: int) -> AbstractAsyncContextManager[Subscription]:
        """Pull from the durable consumer of that name, beginning with that many credits."""

    async def ack_floors(self, consumers: Sequence[str] = ()) -> list[ConsumerFloor]:
        """The positions of these durable consumers, in their order; without any, of all of the log's, by name."""


class CallBus(Protocol):
    """Calls with an answer, and messages to whoever listens: nothing is stored."""

    async def request(self, subject: str, payload: bytes, *, timeout: float) -> bytes:
        """Send a request to the server of ``subject``; raises `NoResponders` at once or `RequestUnanswered` after ``timeout``
        seconds."""

    def serve(self, subject: str, *, limit: int = 1024) -> AbstractAsyncContextManager[RequestServer]: ...

    async def broadcast(self, subject: str, payload: bytes) -> None:
        """Send a core message to the current subscribers: not stored, lost when the connection is down."""

    def listen(self, subject: str, *, limit: int = 1024) -> AbstractAsyncContextManager[Listener]: ...


class Bus(LogBus, WorkBus, CallBus, Protocol):
    """One connection of one worker to the streams of one run: all of it, for those who pass it on. Who uses a part names it."""

    async def declare(self, plan: RunPlan) -> None:
        """Create streams and consumers as planned, or leave them as they are if they exist; repeating is harmless. A
        limit of the log that is planned higher is raised; raises `UserError` for any other difference."""
