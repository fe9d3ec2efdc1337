"""One durable consumer in memory: what is new, what is leased, what is due again, and which waiters have credits.

Leases expire when somebody looks: every call says what time it is, and those who wait ask `next_due` how long. So there is no
task and no timer here. Above it are the subscriptions; below it the stream.
"""

from __future__ import annotations

import heapq
from collections import deque
from typing import Protocol

from fleetbus.bus.base import StreamEntry
from fleetbus.bus.memory_stream import MemoryStream
from fleetbus.bus.memory_subjects import matcher
from fleetbus.bus.streams import ConsumerPlan

REMEMBERED_ACKS = 4096
"""How far back a killed server may forget acks."""


class Puller(Protocol):
    """A subscription as its consumer sees it."""

    def can_receive(self) -> bool:
        """True if it has a credit and can be reached."""

    def deliver(self, entry: StreamEntry, delivered: int, now: float) -> bool:
        """Take a leased entry; True if the consumer shall deliver it once more, as if the lease were over."""

    def alarm(self, at: float) -> None:
        """Something may be due at ``at``: look then, if not before."""


class _Lease:
    __slots__ = ("deadline", "delivered")

    def __init__(self, deadline: float, delivered: int) -> None:
        self.deadline = deadline
        self.delivered = delivered


class MemoryConsumer:
    """Leases of one consumer, in seconds of `anyio.current_time`."""

    def __init__(self, plan: ConsumerPlan, stream: MemoryStream) -> None:
        self.plan = plan
        self._stream = stream
        self._new: deque[int] = deque(stream.find_matches(matcher(plan.filter)))
        self._due_again: dict[int, int] = {}
        self._leases: dict[int, _Lease] = {}
        self._expiries: list[tuple[float, int]] = []
        self._acked: deque[int] = deque(maxlen=REMEMBERED_ACKS)
        self._delivered = 0
        self._pullers: deque[Puller] = deque()

    @property
    def ack_floor(self) -> int:
        """Sequence up to which all that was delivered is acked; it stands still while nothing is."""
        pending = [*self._leases, *self._due_again]
        return min(pending) - 1 if pending else self._delivered

    @property
    def unacked(self) -> int:
        """Number of messages that the stream still holds and that are not acked, delivered or not."""
        if self._stream.count == self._stream.last_sequence:  # nothing was ever removed
            return len(self._new) + len(self._leases) + len(self._due_again)
        return sum(self._stream.get(sequence) is not None for sequence in (*self._new, *self._leases, *self._due_again))

    def add(self, sequence: int) -> None:
        """Take note of a new entry whose subject matches the filter."""
        self._new.append(sequence)

    def join(self, puller: Puller) -> None:
        self._pullers.append(puller)

    def leave(self, puller: Puller) -> None:
        self._pullers.remove(puller)

    def next_due(self) -> float:
        """Time at which the next lease ends or a delayed message is due; infinity if none is."""
        return self._expiries[0][0] if self._expiries else float("inf")

    def dispatch(self, now: float) -> None:
        """Hand out what there is to those who have credits, in turn; what is due again goes first."""
        self._expire(now)
        while (self._due_again or self._new) and (puller := self._next_puller()) is not None:
            if self._due_again:
                sequence = next(iter(self._due_again))
                delivered = self._due_again.pop(sequence) + 1
            else:
                sequence, delivered = self._new.popleft(), 1
                self._delivered = sequence
            entry = self._stream.get(sequence)
            if entry is None:
                continue
            self._lease(sequence, delivered, now + self.plan.ack_wait_seconds)
            if puller.deliver(entry, delivered, now):
                self._end(sequence)

    def ack(self, sequence: int) -> None:
        if self._leases.pop(sequence, None) is not None or self._due_again.pop(sequence, None) is not None:
            self._acked.append(sequence)

    def nak(self, sequence: int, delay_seconds: float, now: float) -> None:
        lease = self._leases.get(sequence)
        if lease is None:
            return
        if delay_seconds > 0:
            self._lease(sequence, lease.delivered, now + delay_seconds)
        else:
            self._end(sequence)

    def extend(self, sequence: int, now: float) -> None:
        lease = self._leases.get(sequence)
        if lease is not None:
            lease.deadline = now + self.plan.ack_wait_seconds

    def forget(self, acks: int) -> None:
        """Apply a server kill: the last ``acks`` acks are lost, all leases end, delivery counts restart."""
        forgotten = [self._acked.pop() for _ in range(min(acks, len(self._acked)))]
        self._new = deque(sorted({*forgotten, *self._leases, *self._due_again, *self._new}))
        self._delivered = min(self._delivered, self._new[0] - 1) if self._new else self._delivered
        self._leases.clear()
        self._due_again.clear()
        self._expiries.clear()

    def begin_again(self) -> None:
        """Apply the loss of the consumer, declared anew: everything in the stream is to be delivered."""
        self.forget(0)
        self._acked.clear()
        self._new = deque(self._stream.find_matches(matcher(self.plan.filter)))
        self._delivered = 0

    def list_unacked(self) -> list[int]:
        """Sequences that it has to deliver, or to deliver again if no ack comes, in order."""
        return sorted({*self._leases, *self._due_again, *self._new})

    def put_back(self, unacked: list[int]) -> None:
        """Apply the loss of all that happened since these were what was not acked."""
        self.forget(0)
        self._acked.clear()
        self._new = deque(unacked)
        self._delivered = unacked[0] - 1 if unacked else self._stream.last_sequence

    def _lease(self, sequence: int, delivered: int, deadline: float) -> None:
        self._leases[sequence] = _Lease(deadline, delivered)
        heapq.heappush(self._expiries, (deadline, sequence))
        if self._expiries[0][0] == deadline:  # earlier than a waiter may know of
            for puller in self._pullers:
                puller.alarm(deadline)

    def _end(self, sequence: int) -> None:
        self._due_again[sequence] = self._leases.pop(sequence).delivered

    def _expire(self, now: float) -> None:
        while self._expiries and self._expiries[0][0] <= now:
            _, sequence = heapq.heappop(self._expiries)
            lease = self._leases.get(sequence)
            if lease is None:
                continue
            if lease.deadline <= now:
                self._end(sequence)
            else:
                heapq.heappush(self._expiries, (lease.deadline, sequence))

    def _next_puller(self) -> Puller | None:
        for _ in range(len(self._pullers)):
            puller = self._pullers[0]
            self._pullers.rotate(-1)
            if puller.can_receive():
                return puller
        return None
