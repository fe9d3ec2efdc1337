"""One worker's bus as its process sees it: the in-memory one, behind a gate that stops when the process is stopped.

A stopped process neither hears nor says anything until it continues, while the server's clocks run; what was on its way waits.
Every use is traced, and the `BusObserver` above observes what only the wire can see: acks, heartbeats, payloads.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Generic, Protocol, TypeVar

import anyio

from fleetbus.bus.base import (
    ConsumerFloor,
    Delivery,
    Listener,
    LogState,
    PublishAck,
    Reader,
    RequestServer,
    StreamEntry,
    Subscription,
)
from fleetbus.bus.memory import MemoryBus
from fleetbus.bus.memory_bus import API_TIMEOUT_SECONDS
from fleetbus.bus.objects import ObjectStore
from fleetbus.bus.streams import RunPlan
from fleetbus.concurrency.notifier import Notifier
from fleetbus.errors import RequestUnanswered
from fleetbus_schemas import MalformedMessage, WorkerStarted, decode, encode
from tests.simulation.observer import Observer
from tests.simulation.platform.bucket import SimulatedObjects
from tests.simulation.platform.network_faults import SeededNetworkFaults

T = TypeVar("T")

STREAM = "fleetbus.sim.stream"
"""What a question is about that is not about a subject."""


class BusObserver(Protocol):
    """Notified of messages on a simulated bus."""

    def on_ack(self, worker: str, message: StreamEntry) -> None: ...
    def on_broadcast(self, worker: str, subject: str, payload: bytes) -> None: ...


class Gate:
    """Open while its process runs."""

    def __init__(self) -> None:
        self.is_open = True
        self._opened = Notifier()

    def close(self) -> None:
        self.is_open = False

    def open(self) -> None:
        self.is_open = True
        self._opened.notify()

    async def wait_open(self) -> None:
        while not self.is_open:
            await self._opened.wait()


class SimulatedDelivery:
    """A delivery whose acks may get lost, and are seen."""

    __slots__ = ("_inner", "_wire")

    def __init__(self, inner: Delivery, wire: SimulatedBus) -> None:
        self._inner = inner
        self._wire = wire

    @property
    def message(self) -> StreamEntry:
        return self._inner.message

    @property
    def delivered(self) -> int:
        return self._inner.delivered

    async def ack(self) -> None:
        self._wire.witness.on_ack(self._wire.worker, self.message)
        if await self._is_delivered():
            await self._inner.ack()

    async def nak(self, delay_seconds: float = 0.0) -> None:
        if await self._is_delivered():
            await self._inner.nak(delay_seconds)

    async def extend(self) -> None:
        if await self._is_delivered():
            await self._inner.extend()

    def forget_message(self) -> None:
        """The acks are known by it."""

    async def _is_delivered(self) -> bool:
        if not self._wire.gate.is_open:
            with anyio.CancelScope(shield=True):
                await self._wire.gate.wait_open()
        return not self._wire.network_faults.loses_ack_message(self.message.subject)


class GatedReceiver(Generic[T]):
    """What is received reaches the process only while it runs and receives; cancelling loses nothing.

    ``lags``: what is read comes from a replica, which may be behind.
    """

    def __init__(self, receive: Callable[[], Awaitable[T]], wire: SimulatedBus, *, lags: bool = False) -> None:
        self._receive = receive
        self._wire = wire
        self._lags = lags
        self._buffer: list[T] = []

    async def receive(self) -> T:
        wire = self._wire
        while True:
            if not self._buffer:
                self._buffer.append(await self._receive())
                if self._lags and (seconds := wire.network_faults.draw_read_lag(wire.worker, "reader")):
                    await anyio.sleep(seconds)
            if wire.gate.is_open and wire.inbox.is_open:
                return self._buffer.pop()
            await wire.gate.wait_open()
            await wire.inbox.wait_open()


class SimulatedSubscription:
    """See `fleetbus.bus.base.Subscription`."""

    def __init__(self, inner: Subscription, wire: SimulatedBus, consumer: str) -> None:
        self._inner = inner
        self._wire = wire
        self._consumer = consumer
        self._receiver = GatedReceiver(inner.receive, wire)

    @property
    def credits(self) -> int:
        return self._inner.credits

    def grant(self, credits: int = 1) -> None:
        self._inner.grant(credits)

    async def receive(self) -> Delivery:
        delivery = await self._receiver.receive()
        sequence, delivered = delivery.message.sequence, delivery.delivered
        self._wire.observer.trace("deliver", self._wire.worker, self._consumer, sequence, delivered)
        return SimulatedDelivery(delivery, self._wire)


class SimulatedListener(GatedReceiver[tuple[str, bytes]]):
    """See `fleetbus.bus.base.Listener`."""

    dropped = 0


class SimulatedBus:
    """See `fleetbus.bus.base.Bus`."""

    def __init__(
        self,
        inner: MemoryBus,
        worker: str,
        gate: Gate,
        inbox: Gate,
        network_faults: SeededNetworkFaults,
        observer: Observer,
        witness: BusObserver,
        bucket: dict[str, bytes] | None = None,
    ) -> None:
        self._inner = inner
        self.worker = worker
        self.gate = gate
        self.inbox = inbox
        self.network_faults = network_faults
        self.observer = observer
        self.witness = witness
        self._bucket = bucket

    def disconnect(self) -> None:
        self._inner.disconnect()

    def reconnect(self) -> None:
        self._inner.reconnect()

    @property
    def storing_problem(self) -> str:
        return self._inner.storing_problem

    @property
    def own_key(self) -> str:
        return self._inner.own_key

    def now_ns(self) -> int:
        return self._inner.now_ns()

    def objects(self, bucket: str) -> ObjectStore | None:
        return SimulatedObjects(self._bucket, self) if self._bucket is not None else None

    async def declare(self, plan: RunPlan) -> None:
        await self._inner.declare(plan)

    async def publish(
        self,
        subject: str,
        payload: bytes,
        *,
        message_id: str | None = None,
        expected_last: int | None = None,
        timeout: float = 30.0,
    ) -> PublishAck:
        await self.gate.wait_open()
        published = await self._inner.publish(
            subject, anonymize(subject, payload), message_id=message_id, expected_last=expected_last, timeout=timeout
        )
        await self.gate.wait_open()
        return published

    @asynccontextmanager
    async def pull(self, consumer: str, *, credits: int) -> AsyncGenerator[Subscription]:
        async with self._inner.pull(consumer, credits=credits) as subscription:
            yield SimulatedSubscription(subscription, self, consumer)

    @asynccontextmanager
    async def read(self, subjects: Sequence[str], *, start: int = 1) -> AsyncGenerator[Reader]:
        async with self._inner.read(subjects, start=start) as reader:
            yield GatedReceiver(reader.receive, self, lags=True)

    def scan(self, subjects: Sequence[str], *, start: int = 1) -> AsyncIterator[StreamEntry]:
        return self._inner.scan(subjects, start=start)

    async def last(self, subject: str) -> StreamEntry | None:
        await self._ask(subject)
        found = await self._inner.last(subject)
        await self._delay_one_way()
        return found

    async def history(self, subjects: Sequence[str]) -> list[StreamEntry]:
        await self._ask(*subjects)
        found = await self._inner.history(subjects)
        await self._delay_one_way()
        return found

    async def last_of_each(self, subjects: Sequence[str]) -> list[StreamEntry]:
        await self._ask(*subjects)
        found = await self._inner.last_of_each(subjects)
        await self._delay_one_way()
        return found

    async def list_subjects(self, subject: str) -> list[str]:
        await self._ask(subject)
        return await self._inner.list_subjects(subject)

    async def log_state(self, consumers: Sequence[str] = ()) -> LogState:
        await self._ask(STREAM)
        return await self._inner.log_state(consumers)

    async def ack_floors(self, consumers: Sequence[str] = ()) -> list[ConsumerFloor]:
        await self._ask(STREAM)
        return await self._inner.ack_floors(consumers)

    async def next_entry(self, subject: str, *, start: int) -> StreamEntry | None:
        await self._ask(subject)
        return await self._inner.next_entry(subject, start=start)

    async def purge(self, subject: str, *, below: int) -> None:
        breaks = self._inner.breaks
        await self._ask(subject)
        self._inner.check_unbroken(breaks)
        await self._inner.purge(subject, below=below)

    async def request(self, subject: str, payload: bytes, *, timeout: float) -> bytes:
        await self.gate.wait_open()
        return await self._inner.request(subject, payload, timeout=timeout)

    @asynccontextmanager
    async def serve(self, subject: str, *, limit: int = 1024) -> AsyncGenerator[RequestServer]:
        async with self._inner.serve(subject, limit=limit) as server:
            yield GatedReceiver(server.receive, self)

    async def broadcast(self, subject: str, payload: bytes) -> None:
        await self.gate.wait_open()
        self.witness.on_broadcast(self.worker, subject, payload)
        await self._inner.broadcast(subject, payload)

    @asynccontextmanager
    async def listen(self, subject: str, *, limit: int = 1024) -> AsyncGenerator[Listener]:
        async with self._inner.listen(subject, limit=limit) as listener:
            yield SimulatedListener(listener.receive, self)

    async def _ask(self, *subjects: str) -> None:
        """The way of a question; raises `RequestUnanswered` if it gets lost."""
        await self._delay_one_way()
        if any(self.network_faults.loses_read(subject) for subject in subjects):
            self.observer.lose_read(self.worker, subjects, seconds=API_TIMEOUT_SECONDS)
            await anyio.sleep(API_TIMEOUT_SECONDS)
            raise RequestUnanswered(f"the server did not answer {subjects[0]} within {API_TIMEOUT_SECONDS:g} s")

    async def _delay_one_way(self) -> None:
        """One way of a question or of its answer."""
        await self.gate.wait_open()
        seconds = self.network_faults.seconds()
        if seconds:
            await anyio.sleep(seconds)
            await self.gate.wait_open()


def anonymize(subject: str, payload: bytes) -> bytes:
    """A worker's hello without host and process id: they would differ between two runs of one seed."""
    if ".life." not in subject:
        return payload
    try:
        started = decode(WorkerStarted, payload, subject=subject)
    except MalformedMessage:
        return payload
    return encode(WorkerStarted(role=started.role, worker=started.worker, slots=started.slots, lane=started.lane))
