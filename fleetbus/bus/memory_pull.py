"""A client's side of pulling and reading in memory: credits, deliveries on their way, and the order of the log.

Above it are the workers; below it consumer and stream. Nothing here runs by itself: a waiting receiver sets its own alarm for
the next lease that ends.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Awaitable, Callable

import anyio
import anyio.lowlevel

from fleetbus.bus.base import Delivery, StreamEntry
from fleetbus.bus.doubts import add_doubts
from fleetbus.bus.memory_connection import MemoryConnection
from fleetbus.bus.memory_consumer import MemoryConsumer
from fleetbus.bus.memory_faults import Faults
from fleetbus.bus.memory_stream import MemoryStream
from fleetbus.bus.memory_subjects import Matcher
from fleetbus.errors import BusError, LogLost


class MemoryDelivery:
    """See `fleetbus.bus.base.Delivery`."""

    __slots__ = ("_subscription", "delivered", "message")

    def __init__(self, subscription: MemorySubscription, message: StreamEntry, delivered: int) -> None:
        self._subscription = subscription
        self.message = message
        self.delivered = delivered

    async def ack(self) -> None:
        consumer = self._subscription.consumer_for_ack()
        if consumer is not None:
            consumer.ack(self.message.sequence)

    async def nak(self, delay_seconds: float = 0.0) -> None:
        self.nak_now(delay_seconds)

    async def extend(self) -> None:
        consumer = self._subscription.consumer_for_ack()
        if consumer is not None:
            consumer.extend(self.message.sequence, anyio.current_time())

    def forget_message(self) -> None:
        """It is the stream's own."""

    def nak_now(self, delay_seconds: float = 0.0) -> None:
        consumer = self._subscription.consumer_for_ack()
        if consumer is not None:
            now = anyio.current_time()
            consumer.nak(self.message.sequence, delay_seconds, now)
            consumer.dispatch(now)


class MemorySubscription:
    """See `fleetbus.bus.base.Subscription`. ``consumer`` None means that there is no such consumer."""

    def __init__(
        self, consumer: MemoryConsumer | None, name: str, link: MemoryConnection, faults: Faults, worker: str, credits: int
    ) -> None:
        self._consumer = consumer
        self._name = name
        self._link = link
        self._faults = faults
        self._worker = worker
        self._open = credits
        self._arrived: deque[MemoryDelivery] = deque()
        self._travelling: list[tuple[float, int, MemoryDelivery]] = []
        self._departed = 0
        self._alarm_at = float("-inf")
        self._wake = anyio.Event()

    @property
    def credits(self) -> int:
        return self._open + len(self._travelling) + len(self._arrived)

    def grant(self, credits: int = 1) -> None:
        self._open += credits
        self.dispatch()

    async def receive(self) -> Delivery:
        await anyio.lowlevel.checkpoint()
        if self._consumer is None:
            raise BusError(f"consumer {self._name} does not exist: create the run first")
        while True:
            now = anyio.current_time()
            if self._link.up:
                self._consumer.dispatch(now)
            while self._travelling and self._travelling[0][0] <= now:
                self._arrived.append(heapq.heappop(self._travelling)[2])
            if self._arrived:
                return self._arrived.popleft()
            self._wake = anyio.Event()
            self._alarm_at = self._next_due()
            try:
                with anyio.move_on_after(self._alarm_at - now):
                    await self._wake.wait()
            finally:
                self._alarm_at = float("-inf")

    def dispatch(self) -> None:
        """Let the consumer deliver to subscriptions with credits."""
        if self._consumer is not None and self._link.up:
            self._consumer.dispatch(anyio.current_time())

    def can_receive(self) -> bool:
        return self._open > 0 and self._link.up

    def deliver(self, entry: StreamEntry, delivered: int, now: float) -> bool:
        fault = self._faults.draw_delivery_fault(self._worker, self._name, entry.subject)
        if not fault.lost:
            self._open -= 1
            self._departed += 1
            delivery = MemoryDelivery(self, entry, delivered)
            if fault.seconds > 0:
                heapq.heappush(self._travelling, (now + fault.seconds, self._departed, delivery))
            else:
                self._arrived.append(delivery)
            self._wake.set()
        return fault.repeated

    def alarm(self, at: float) -> None:
        if at < self._alarm_at:
            self._wake.set()

    def consumer_for_ack(self) -> MemoryConsumer | None:
        """The consumer, None if this ack is lost."""
        if not self._link.up or self._faults.loses_ack(self._worker, self._name):
            return None
        return self._consumer

    def enter(self) -> None:
        self._link.on_up[self] = self.dispatch
        if self._consumer is not None:
            self._consumer.join(self)
            self.dispatch()

    def leave(self) -> None:
        """Stop pulling and return undelivered messages."""
        del self._link.on_up[self]
        if self._consumer is None:
            return
        self._consumer.leave(self)
        for delivery in [*self._arrived, *(each[2] for each in self._travelling)]:
            delivery.nak_now()

    def _next_due(self) -> float:
        travelling = self._travelling[0][0] if self._travelling else float("inf")
        if self._consumer is None or not self._link.up:
            return travelling
        return min(travelling, self._consumer.next_due())


TRUNCATION_SECONDS = 3.5
"""How long a reader waits for a log that ends before what it has read."""


class MemoryReader:
    """See `fleetbus.bus.base.Reader`."""

    def __init__(
        self,
        stream: MemoryStream,
        matches: Matcher,
        start: int,
        link: MemoryConnection,
        get_last_stored: Callable[[], StreamEntry | None],
    ) -> None:
        self._stream = stream
        self._matches = matches
        self._get_last_stored = get_last_stored
        self._next = max(start, 1)
        self._start = self._next
        self._last: StreamEntry | None = None
        self._doubted: list[StreamEntry] = []
        self._link = link
        self._wake = anyio.Event()

    async def receive(self) -> StreamEntry:
        await anyio.lowlevel.checkpoint()
        while True:
            self._doubt()
            if self._is_truncated:
                await anyio.sleep(TRUNCATION_SECONDS)
                self._require_kept(is_truncated=self._is_truncated)
            self._require_kept(is_truncated=False)
            if self._link.up:
                self._doubted = []
                if (entry := self._advance()) is not None:
                    self._last = entry
                    return entry
            self._wake = anyio.Event()
            await self._wake.wait()

    def _doubt(self) -> None:
        """Expect what is stored by now to be there, however much this client stores before it can look."""
        if (stored := self._get_last_stored()) is not None:
            self._doubted = add_doubts(self._doubted, [stored])

    @property
    def _is_truncated(self) -> bool:
        known = max((entry.sequence for entry in (self._last, *self._doubted) if entry is not None), default=0)
        return self._link.up and self._stream.last_sequence < known

    def _require_kept(self, *, is_truncated: bool) -> None:
        """Raises `BusError` if another entry stands where one was read or stored last, on whichever subject, or the log ends
        before it."""
        if not self._link.up:
            return
        stored = [(entry, "stored") for entry in (self._link.lost, *self._doubted)]
        for entry, done in (*stored, (self._last, "read")):
            if entry is None:
                continue
            found = self._stream.get(entry.sequence)
            is_another = found is not None and (found.subject, found.payload) != (entry.subject, entry.payload)
            if is_another or entry is self._link.lost or (is_truncated and self._stream.last_sequence < entry.sequence):
                raise LogLost(
                    f"entry {entry.sequence} of the log was {done} before, and is not there: the server lost entries, or "
                    "the run was created again: restart this worker"
                )

    def enter(self) -> None:
        self._stream.on_stored[self] = self._on_stored
        self._link.on_up[self] = self._on_up

    def leave(self) -> None:
        del self._stream.on_stored[self]
        del self._link.on_up[self]

    def _advance(self) -> StreamEntry | None:
        while self._next <= self._stream.last_sequence:
            entry = self._stream.get(self._next)
            self._next += 1
            if entry is not None and self._matches(entry.subject):
                return entry
        return None

    def _on_stored(self, entry: StreamEntry) -> None:
        if not self._wake.is_set() and self._matches(entry.subject):
            self._wake.set()

    def _on_up(self) -> None:
        self._doubt()
        self._next = self._last.sequence + 1 if self._last is not None else self._start
        self._wake.set()


class MemoryScan:
    """Iterates over the entries up to the end of the log as it was at the first step; holds nothing, so it needs no closing."""

    def __init__(self, reach: Callable[[str], Awaitable[None]], stream: MemoryStream, matches: Matcher, start: int) -> None:
        self._reach = reach
        self._stream = stream
        self._matches = matches
        self._next = max(start, 1)
        self._end: int | None = None

    def __aiter__(self) -> MemoryScan:
        return self

    async def __anext__(self) -> StreamEntry:
        await self._reach("scan")
        if self._end is None:
            self._end = self._stream.last_sequence
        while self._next <= self._end:
            entry = self._stream.get(self._next)
            self._next += 1
            if entry is not None and self._matches(entry.subject):
                return entry
        raise StopAsyncIteration
