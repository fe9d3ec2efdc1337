"""Following the log in order: an ephemeral consumer without acks, recreated after the last entry read on any anomaly.

Anomalies are a gap in the consumer's own numbering, a reconnect, a silence, a consumer that is gone. Above it is the bus;
below it
one `PullRequests` and the API. It never skips and never repeats an entry.
"""

from __future__ import annotations

import logging
import math
import secrets
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from heapq import heapify, heappop, heapreplace
from typing import Any

import anyio

from fleetbus.bus.base import StreamEntry
from fleetbus.bus.nats.api import CONSUMER_EXISTS, NO_CONSUMERS_LEFT, STREAM_NOT_FOUND, ApiRefused
from fleetbus.bus.nats.connection import Connection
from fleetbus.bus.nats.log_identity import LogIdentity, LogReplaced
from fleetbus.bus.nats.protocol import check_subject, parse_ack_subject, publish_command
from fleetbus.bus.nats.pull_requests import PullRequests
from fleetbus.bus.nats.receive_queue import ReceiveQueue
from fleetbus.bus.streams import READER
from fleetbus.errors import BusError, LogLost, RequestUnanswered, UserError

log = logging.getLogger(__name__)

WINDOW_CREDITS = 512
"""Entries that may wait here before the reader takes them."""

INACTIVE_SECONDS = 60.0
"""The server removes a reader's consumer without pulls for this long."""

MAX_PLACEMENT_TRIES = 16
"""So often a consumer is recreated that lives on another server than is wanted; of three servers, each is chosen as often."""

_CHECK_EVERY_SECONDS = 1.0
_RETRY_SECONDS = 0.5
_NO_NAME_LEFT = "has as many readers by this key as it may have: end one; those of programs that were killed end after a minute"
NAME_SECONDS = 10.0
"""How long one waits for a name where others have them all: most readers are there for a scan alone."""

_TOO_MANY_READERS = "takes no more readers: raise max_consumers of the stream or the account, or declare fewer lanes"

_NO_END = 1 << 63
"""Beyond every sequence: read until nothing is pending."""


class NoNameLeft(UserError):
    """Others read under all names that this user may read under."""


class NatsReader:
    """See `fleetbus.bus.base.Reader`."""

    def __init__(
        self,
        connection: Connection,
        stream: str,
        subjects: Sequence[str],
        start: int,
        *,
        beside: str = "",
        identity: LogIdentity | None = None,
        name_seconds: float = NAME_SECONDS,
    ) -> None:
        self._connection = connection
        self._identity = identity or LogIdentity(connection, stream)
        self._beside = beside
        self._stream = stream
        self._subjects = [check_subject(subject) for subject in subjects]
        self._next = max(start, 1)
        self._consumer = ""
        self._left_behind = ""
        """A consumer that nothing was heard of any more: that it is deleted was said to nobody, and it keeps its name."""
        self._consumer_sequence = 0
        self._pull_requests = PullRequests(connection, self._on_message, self._on_trouble, acks=False)
        self._pull_requests.add(WINDOW_CREDITS)
        self._queue: ReceiveQueue[StreamEntry] = ReceiveQueue()
        self._restart = anyio.Event()
        self._pending = -1
        self._last_read = 0
        self._last_time_ns = 0
        self._is_first = True
        self._is_repeating = False
        self._name_seconds = name_seconds
        self._nameless_since = math.inf

    async def receive(self) -> StreamEntry:
        entry = await self._queue.take()
        self._pull_requests.add(1)
        return entry

    async def receive_until(self, end: int) -> StreamEntry | None:
        """The next matching entry, or None once there is none left with a sequence up to ``end``; raises `BusError` if what is
        left cannot be known."""
        while not self._queue.items:
            if self._queue.failure is not None:
                raise self._queue.failure
            if self._next > end or self._pending == 0:
                return None
            with anyio.move_on_after(_CHECK_EVERY_SECONDS):
                await self._queue.wait()
                continue
            await self._count_pending()
        return await self.receive() if self._queue.items[0].sequence <= end else None

    def interrupt(self) -> None:
        """Recreate the consumer: what it sent last may be lost."""
        self._identity.doubt()
        self._restart.set()

    async def follow(self) -> None:
        """Keep a consumer attached; runs beside the reader."""
        while self._queue.failure is None:
            self._restart = anyio.Event()
            if not await self._attach():
                await anyio.sleep(_RETRY_SECONDS)
                continue
            while not self._restart.is_set() and not self._pull_requests.is_silent():
                with anyio.move_on_after(_CHECK_EVERY_SECONDS):
                    await self._restart.wait()
            log.debug("nats: recreating the reader of %s from sequence %d", self._stream, self._next)
            self._drop_consumer()

    def leave(self) -> None:
        self._pull_requests.close()
        self._drop_consumer()

    async def _attach(self) -> bool:
        try:
            is_first, self._is_first = self._is_first, False
            if not is_first and not await self._identity.check(self._last_read, self._last_time_ns):
                return False
            name, answer = await self._create_consumer()
        except ApiRefused as refused:
            if refused.code == STREAM_NOT_FOUND:
                self._queue.fail(BusError(f"stream {self._stream} does not exist: create the run first"))
            elif refused.code == NO_CONSUMERS_LEFT:
                self._queue.fail(UserError(f"stream {self._stream} {_TOO_MANY_READERS}"))
            elif refused.code in CONSUMER_EXISTS:
                self._nameless_since = min(self._nameless_since, anyio.current_time())
                if anyio.current_time() - self._nameless_since >= self._name_seconds:
                    self._queue.fail(NoNameLeft(f"stream {self._stream} {_NO_NAME_LEFT}"))
            else:
                self._queue.fail(BusError(f"stream {self._stream} cannot be read: {refused}"))
            return False
        except LogReplaced as replaced:
            self.fail_lost(str(replaced))
            return False
        except RequestUnanswered:
            return False
        self._nameless_since = math.inf
        self._consumer = name
        self._consumer_sequence = 0
        self._is_repeating = bool(self._last_read)
        self._note_pending(answer["num_pending"])
        self._pull_requests.attach(self._stream, name)
        return True

    async def _create_consumer(self) -> tuple[str, dict[str, Any]]:
        """A consumer and what the server says of it. A server chooses where it lives: what is not where it should be is made
        anew."""
        if self._left_behind:
            self._delete(self._left_behind)
            self._left_behind = ""
        for left in reversed(range(MAX_PLACEMENT_TRIES)):
            name, answer = await self._create_under_free_name()
            cluster = answer.get("cluster")  # none where one server is all there is
            if not left or not self._beside or not cluster or cluster.get("leader") == self._beside:
                break
            self._delete(name)
        return name, answer

    async def _create_under_free_name(self) -> tuple[str, dict[str, Any]]:
        """A consumer under a name that cannot be guessed, or under one of those that this user has to take."""
        names = secrets.SystemRandom().sample(self._connection.reader_names, len(self._connection.reader_names))
        for name in names:
            try:
                return name, await self._ask_for_consumer(name)
            except ApiRefused as refused:
                if refused.code not in CONSUMER_EXISTS or name == names[-1]:
                    raise
        name = f"{READER}{secrets.token_hex(8)}"
        return name, await self._ask_for_consumer(name)

    async def _ask_for_consumer(self, name: str) -> dict[str, Any]:
        return await self._connection.api.ask(self._build_create_subject(name), self._build_create_request(name))

    def fail_lost(self, what: str) -> None:
        """The log is not what it was: let `receive` raise."""
        self._pull_requests.detach()
        self.interrupt()
        self._queue.fail(LogLost(f"{what}: the server lost entries, or the run was created again: restart this worker"))

    def _build_create_subject(self, name: str) -> str:
        """One filter stands in the subject too, where the server's permissions see it; for several there is no such form, and
        who reads under names of its own may read all."""
        filtered = self._subjects if len(self._subjects) == 1 and not self._connection.reader_names else []
        return ".".join(["CONSUMER.CREATE", self._stream, name, *filtered])

    def _build_create_request(self, name: str) -> dict[str, Any]:
        config: dict[str, Any] = {
            "name": name,
            "deliver_policy": "by_start_sequence",
            "opt_start_seq": self._last_read or self._next,  # what was read last shows whether this is still the same log
            "ack_policy": "none",
            "replay_policy": "instant",
            "mem_storage": True,
            "num_replicas": 1,
            "inactive_threshold": int(INACTIVE_SECONDS * 1e9),
            "metadata": {"reader": secrets.token_hex(8)},  # what reads the same is not the same reader
        }
        if len(self._subjects) == 1:
            config["filter_subject"] = self._subjects[0]
        elif self._subjects:
            config["filter_subjects"] = self._subjects
        return {"stream_name": self._stream, "config": config, "action": "create"}

    async def _count_pending(self) -> None:
        """The log may have been trimmed below us, so that what was promised never comes."""
        if not self._consumer or self._queue.items:
            return
        consumer = self._consumer
        try:
            answer = await self._connection.api.ask(f"CONSUMER.INFO.{self._stream}.{consumer}")
        except (ApiRefused, RequestUnanswered):
            self.interrupt()
            return
        if consumer == self._consumer and answer["delivered"]["consumer_seq"] == self._consumer_sequence:
            self._note_pending(answer["num_pending"])

    def _note_pending(self, pending: int) -> None:
        self._pending = pending
        if not pending:
            self._queue.wake()

    def _on_message(self, subject: bytes, reply: bytes, payload: bytes) -> None:
        arrival = parse_ack_subject(reply)
        if arrival.consumer_sequence != self._consumer_sequence + 1:
            self._pull_requests.add(1)  # this one is not taken
            self._pull_requests.detach()
            self.interrupt()
            return
        self._consumer_sequence += 1
        if self._is_repeating:
            self._is_repeating = False
            if arrival.stream_sequence == self._last_read:
                if arrival.time_ns != self._last_time_ns:
                    self.fail_lost(f"entry {self._last_read} of stream {self._stream} is not the one that was read before")
                    return
                self._pull_requests.add(1)
                self._note_pending(arrival.pending)
                return
        self._last_read, self._last_time_ns = arrival.stream_sequence, arrival.time_ns
        self._next = arrival.stream_sequence + 1
        self._pending = arrival.pending
        self._queue.put(
            StreamEntry(subject=subject.decode(), payload=payload, sequence=arrival.stream_sequence, time_ns=arrival.time_ns)
        )

    def _on_trouble(self, text: str) -> None:
        self.interrupt()

    def _drop_consumer(self) -> None:
        is_silent = self._pull_requests.is_silent()
        self._pull_requests.detach()
        if self._consumer:
            self._left_behind = self._consumer if is_silent else ""
            self._delete(self._consumer)
            self._consumer = ""

    def _delete(self, consumer: str) -> None:
        subject = f"{self._connection.api.prefix}.CONSUMER.DELETE.{self._stream}.{consumer}"
        command = publish_command(subject, "", b"")
        self._connection.wire.send_or_drop(command)


@asynccontextmanager
async def open_reader(
    connection: Connection, stream: str, subjects: Sequence[str], start: int, **options: Any
) -> AsyncGenerator[NatsReader]:
    """Read ``stream`` for the length of the block. Options:

    - ``beside``: if possible on the server of this name. The leader of a replicated stream has all of it, and another replica
      may lag and take what is missing for the end.
    - ``identity``: what tells it, when it comes back, whether this is still the same log.
    - ``name_seconds``: how long it waits for a name, if it has to take one of a few. Who waits for one of several readers must
      not wait so: others may wait for those that it has.
    """
    reader = NatsReader(connection, stream, subjects, start, **options)
    scope = anyio.CancelScope()

    async def follow() -> None:
        with scope:
            await reader.follow()

    connection.tasks.start_soon(follow, name=f"nats read {stream}")
    connection.on_reconnect[reader] = reader.interrupt
    connection.on_lost[reader] = reader.fail_lost
    try:
        yield reader
    finally:
        del connection.on_reconnect[reader], connection.on_lost[reader]
        scope.cancel()
        reader.leave()


async def scan_histories(connection: Connection, stream: str, subjects: Sequence[str]) -> list[StreamEntry]:
    """As `fleetbus.bus.nats.direct.get_histories`, by one consumer per subject: the server sees which subjects are read."""
    found: list[StreamEntry] = []
    for subject in dict.fromkeys(subjects):
        async with open_reader(connection, stream, (subject,), 1) as reader:
            while (entry := await reader.receive_until(_NO_END)) is not None:
                found.append(entry)
    found.sort(key=lambda entry: entry.sequence)
    return found


MAX_READERS = 16
"""More filters than this share one consumer."""


def split_filters(subjects: Sequence[str]) -> list[Sequence[str]]:
    """The filters of each reader."""
    distinct = list(dict.fromkeys(subjects))
    return [[subject] for subject in distinct] if 1 < len(distinct) <= MAX_READERS else [distinct]


async def merge_entries(readers: Sequence[NatsReader], end: int) -> AsyncGenerator[StreamEntry]:
    """The entries of all readers up to the sequence ``end``, in order, each once: several filters read by one reader each.

    One consumer with several filters is far slower: of 118,200 entries nats-server 2.15 gave 38,400 by two filters in 6.1 s, by
    two consumers in 0.8 s, and by five filters in 10.8 s, at the cost of its other clients.
    """
    firsts = [await reader.receive_until(end) for reader in readers]
    heads = [(entry.sequence, index, entry) for index, entry in enumerate(firsts) if entry is not None]
    heapify(heads)
    last = 0
    while heads:
        sequence, index, entry = heads[0]
        following = await readers[index].receive_until(end)
        if following is None:
            heappop(heads)
        else:
            heapreplace(heads, (following.sequence, index, following))
        if sequence > last:  # filters may overlap
            last = sequence
            yield entry
