"""One client of the in-memory server: the promises of `fleetbus.bus.base.Bus`, with the configured faults.

Above it is one worker; below it are server, link, streams and consumers.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from typing import Protocol, TypeVar

import anyio
import anyio.lowlevel

from fleetbus.bus.base import (
    ConsumerFloor,
    Listener,
    LogState,
    PublishAck,
    Reader,
    RequestServer,
    StreamEntry,
    Subscription,
    check_literal,
)
from fleetbus.bus.memory_calls import MemoryListener, MemoryRequestServer, PendingAnswer
from fleetbus.bus.memory_connection import MemoryConnection
from fleetbus.bus.memory_consumer import MemoryConsumer
from fleetbus.bus.memory_pull import MemoryReader, MemoryScan, MemorySubscription
from fleetbus.bus.memory_server import ServerState
from fleetbus.bus.memory_stream import MemoryStream
from fleetbus.bus.memory_subjects import any_matcher, matcher
from fleetbus.bus.objects import ObjectStore
from fleetbus.bus.streams import RunPlan, lane_stream, log_stream
from fleetbus.errors import BusError, NoResponders, PublishUnanswered, RequestUnanswered, SequenceConflict
from fleetbus_schemas import Subjects

MAX_PAYLOAD_BYTES = 1 << 20
"""``max_payload`` of a nats-server by default; it counts the headers of a message, too."""

HEADER_BYTES = 128
RESEND_SECONDS = 2.0
ELECTION_SECONDS = 2.0
"""How long a question to a leader waits for the end of an election before it counts as unanswered."""

API_TIMEOUT_SECONDS = 30.0


class MemoryBus:
    """See `fleetbus.bus.base.Bus`."""

    def __init__(self, server: ServerState, link: MemoryConnection, run: str, worker: str, number: int) -> None:
        self._server = server
        self._number = number
        self._link = link
        self._log = log_stream(run)
        self._lanes = lane_stream(run)
        self._subjects = Subjects(run)
        self._worker = worker
        self._count = 0
        self._stored: dict[str, StreamEntry] = {}
        """By stream what this connection stored there last."""

        self._known: dict[str, int] = {}
        """By subject the highest position that this connection was given: it repeats reads that end before (record 0024)."""

    def disconnect(self) -> None:
        """Disconnect this client: messages in both directions are lost, its leases expire."""
        self._link.change(connected=False)

    def reconnect(self) -> None:
        """End what `disconnect` began; pulls and readers continue."""
        self._link.change(connected=True)

    @property
    def storing_problem(self) -> str:
        return ""  # this one stores, or is not reached

    @property
    def own_key(self) -> str:
        return ""  # it asks for none

    def now_ns(self) -> int:
        return self._server.now_ns()

    async def declare(self, plan: RunPlan) -> None:
        await self._wait_for_server("declare")
        self._server.declare(plan)

    async def publish(
        self,
        subject: str,
        payload: bytes,
        *,
        message_id: str | None = None,
        expected_last: int | None = None,
        timeout: float = 30.0,
    ) -> PublishAck:
        check_literal(subject)
        if len(payload) + HEADER_BYTES > MAX_PAYLOAD_BYTES:
            raise BusError(f"{subject}: {len(payload)} bytes and headers exceed the server's limit of {MAX_PAYLOAD_BYTES}")
        give_up_at = anyio.current_time() + timeout
        identifier = message_id or self._new_id()
        await anyio.lowlevel.checkpoint()
        while await self._link.wait(give_up_at - anyio.current_time()):
            breaks = self._link.breaks
            published = await self._try_to_publish(subject, payload, identifier, expected_last)
            if published is not None:
                return published
            left = give_up_at - anyio.current_time()
            await self._link.wait_for_break_to_end(breaks, min(RESEND_SECONDS, left))
            if anyio.current_time() >= give_up_at:
                break
        raise PublishUnanswered(f"{subject}: no ack within {timeout:g} s")

    def pull(self, consumer: str, *, credits: int) -> AbstractAsyncContextManager[Subscription]:
        found = self._server.consumer(self._log, consumer)
        subscription = MemorySubscription(found, consumer, self._link, self._server.faults, self._worker, credits)
        return _enter(subscription)

    @asynccontextmanager
    async def read(self, subjects: Sequence[str], *, start: int = 1) -> AsyncGenerator[Reader]:
        stream = self._stream_of(subjects)
        reader = MemoryReader(stream, any_matcher(subjects), start, self._link, lambda: self._stored.get(stream.plan.name))
        async with _enter(reader):
            yield reader

    def scan(self, subjects: Sequence[str], *, start: int = 1) -> AsyncIterator[StreamEntry]:
        return MemoryScan(self._wait_for_leader, self._stream_of(subjects), any_matcher(subjects), start)

    async def last(self, subject: str) -> StreamEntry | None:
        await self._wait_for_server(subject)
        found = self._read_subject(self._stream_of((subject,)), subject)
        return found[-1] if found else None

    async def last_of_each(self, subjects: Sequence[str]) -> list[StreamEntry]:
        await self._wait_for_server("last of each")
        stream = self._stream_of(subjects)
        end = self._find_end(stream, subjects[-1])
        found = [entry for subject in dict.fromkeys(subjects) for entry in stream.on_subject(subject) if entry.sequence <= end]
        return list({entry.subject: entry for entry in found}.values())

    async def list_subjects(self, subject: str) -> list[str]:
        await self._wait_for_server("subjects")
        return self._server.stream(self._log).list_subjects(matcher(subject))

    async def history(self, subjects: Sequence[str]) -> list[StreamEntry]:
        await self._wait_for_server("history")
        stream = self._stream_of(subjects)
        entries = [entry for subject in dict.fromkeys(subjects) for entry in self._read_subject(stream, subject)]
        return sorted(entries, key=lambda entry: entry.sequence)

    async def log_state(self, consumers: Sequence[str] = ()) -> LogState:
        await self._wait_for_leader("log state")
        stream = self._server.stream(self._log)
        first = next((sequence for sequence in stream.find_matches(lambda subject: True)), stream.last_sequence + 1)
        return LogState(
            first_sequence=first,
            last_sequence=stream.last_sequence,
            entries=stream.count,
            used_bytes=stream.size_bytes,
            limit_bytes=stream.plan.max_bytes,
            duplicate_window_seconds=stream.plan.duplicate_window_seconds,
            created=stream.created,
            begins=stream.plan.first_sequence,
            unacked=sum(self._find_consumer(name).unacked for name in consumers),
        )

    async def ack_floors(self, consumers: Sequence[str] = ()) -> list[ConsumerFloor]:
        await self._wait_for_leader("ack floors")
        found = [self._find_consumer(name) for name in consumers] or self._server.consumers(self._log)
        return [ConsumerFloor(name=each.plan.name, filter=each.plan.filter, ack_floor=each.ack_floor) for each in found]

    async def next_entry(self, subject: str, *, start: int) -> StreamEntry | None:
        await self._wait_for_server(subject)
        found = self._server.stream(self._log).next(matcher(subject), start)
        return (
            found if found is not None and found.sequence <= self._find_end(self._server.stream(self._log), subject) else None
        )

    async def purge(self, subject: str, *, below: int) -> None:
        breaks = self.breaks
        await self._wait_for_leader("purge")
        self.check_unbroken(breaks)
        self._server.stream(self._log).purge(below, matcher(subject))

    @property
    def breaks(self) -> int:
        """Number of times that the connection went down; -1 while it is down."""
        return self._link.breaks if self._link.up else -1

    def check_unbroken(self, breaks: int) -> None:
        """Raise `RequestUnanswered` if the connection is down, or was since ``breaks`` was read."""
        if breaks < 0 or breaks != self.breaks:
            raise RequestUnanswered("the connection was down")

    async def request(self, subject: str, payload: bytes, *, timeout: float) -> bytes:
        give_up_at = anyio.current_time() + timeout
        await anyio.lowlevel.checkpoint()
        answer = PendingAnswer(self._link)
        if await self._link.wait(timeout) and await self._delay_core_message(subject):
            if not self._server.subscriptions.send(subject, payload, answer.respond):
                raise NoResponders(f"no responders for {subject}")
        await answer.wait(give_up_at - anyio.current_time())
        if answer.payload is None:
            raise RequestUnanswered(f"{subject}: no answer within {timeout:g} s")
        return answer.payload

    @asynccontextmanager
    async def serve(self, subject: str, *, limit: int = 1024) -> AsyncGenerator[RequestServer]:
        requests = MemoryRequestServer(self._link, limit)
        self._server.subscriptions.subscribe(requests, subject, self._link, requests.on_message)
        try:
            yield requests
        finally:
            self._server.subscriptions.unsubscribe(requests, subject)

    async def broadcast(self, subject: str, payload: bytes) -> None:
        if self._link.up and await self._delay_core_message(subject):
            self._server.subscriptions.send(subject, payload)
        await anyio.lowlevel.checkpoint()

    @asynccontextmanager
    async def listen(self, subject: str, *, limit: int = 1024) -> AsyncGenerator[Listener]:
        listener = MemoryListener(limit)
        self._server.subscriptions.subscribe(listener, subject, self._link, listener.on_message)
        try:
            yield listener
        finally:
            self._server.subscriptions.unsubscribe(listener, subject)

    async def _try_to_publish(
        self, subject: str, payload: bytes, identifier: str, expected_last: int | None
    ) -> PublishAck | None:
        """One try; None if it or its answer was lost on the way."""
        fault = self._server.faults.draw_publish_fault(self._worker, subject)
        breaks = self._link.breaks
        before = dict(self._stored)
        await self._delay(fault.seconds_before)
        if fault.stored_after:
            store = partial(self._server.store_late, subject, payload, identifier, expected_last)
            self._server.faults.postpone(fault.stored_after, store)
        if fault.lost == "message" or self._link.breaks != breaks or not self._server.faults.has_leader:
            return None
        stream = self._server.stream_for(subject)
        try:
            published = stream.store(subject, payload, identifier, expected_last, self._server.now_ns())
        except BusError as refused:
            if fault.lost == "answer":
                return None
            if isinstance(refused, SequenceConflict):
                self._known[subject] = stream.last_on(subject)
            raise
        await self._delay(fault.seconds_after)
        if fault.lost == "answer" or self._link.breaks != breaks:
            return None
        self._known[subject] = max(published.sequence, self._known.get(subject, 0))
        name = stream.plan.name
        if name not in self._stored or published.sequence > self._stored[name].sequence:
            entry = StreamEntry(subject=subject, payload=payload, sequence=published.sequence, time_ns=0)
            self._stored[name] = entry
        elif name in before and published.sequence <= before[name].sequence and not published.duplicate:
            self._link.lost = before[name]  # its position was taken when this was sent
        return published

    async def _delay(self, seconds: float) -> None:
        if seconds > 0:
            await anyio.sleep(seconds)
        else:
            await anyio.lowlevel.checkpoint()

    async def _delay_core_message(self, subject: str) -> bool:
        """Let a core message be under way; False if it is lost."""
        breaks = self._link.breaks
        seconds = self._server.faults.draw_call_delay(self._worker, subject)
        if seconds:
            await anyio.sleep(seconds)
        return seconds is not None and self._link.breaks == breaks

    async def _wait_for_server(self, what: str) -> None:
        await anyio.lowlevel.checkpoint()
        if not await self._link.wait(API_TIMEOUT_SECONDS):
            raise RequestUnanswered(f"the server did not answer {what} within {API_TIMEOUT_SECONDS:g} s")

    async def _wait_for_leader(self, what: str) -> None:
        await self._wait_for_server(what)
        if not self._server.faults.has_leader:
            await anyio.sleep(ELECTION_SECONDS)
            if not self._server.faults.has_leader:
                raise RequestUnanswered(f"the server did not answer {what}: the stream has no leader")

    def _find_consumer(self, name: str) -> MemoryConsumer:
        found = self._server.consumer(self._log, name)
        if found is None:
            raise BusError(f"consumer {name} does not exist: create the run first")
        return found

    def _read_subject(self, stream: MemoryStream, subject: str) -> list[StreamEntry]:
        """Entries of a literal subject that the replica that answers has."""
        end = self._find_end(stream, subject)
        return [entry for entry in stream.on_subject(subject) if entry.sequence <= end]

    def _find_end(self, stream: MemoryStream, subject: str) -> int:
        """Last sequence of the log at the replica that answers; never before what this connection knows of the subject."""
        seconds = self._server.faults.draw_read_lag(self._worker, subject)
        if not seconds:
            return stream.last_sequence
        return max(stream.find_end(self._server.now_ns() - int(seconds * 1e9)), self._known.get(subject, 0))

    def _stream_of(self, subjects: Sequence[str]) -> MemoryStream:
        for name, pattern in ((self._log, self._subjects.log), (self._lanes, self._subjects.lanes)):
            if all(subject.startswith(pattern[:-1]) for subject in subjects):
                return self._server.stream(name)
        raise BusError(f"no single stream of this run stores {', '.join(subjects)}")

    def objects(self, bucket: str) -> ObjectStore | None:
        return None

    def _new_id(self) -> str:
        self._count += 1
        return f"{self._worker}-{self._number}-{self._count}"


class _EnterLeave(Protocol):
    def enter(self) -> None: ...
    def leave(self) -> None: ...


E = TypeVar("E", bound=_EnterLeave)


@asynccontextmanager
async def _enter(thing: E) -> AsyncGenerator[E]:
    thing.enter()
    try:
        yield thing
    finally:
        thing.leave()
