"""The slots of one process that serves several runs: each run pulls what `FairShares` grants it at the moment.

A run that has nothing to do keeps a credit or a few with the server, by which it is noticed when it wakes, and no slot. What
comes on such a credit while all slots are in use waits for the next one that is free, its lease extended: handed back it would
come again at once, here or at the next such worker, and so many deliveries of one message look like workers that it killed.
Above it are the inference workers, one per run; below it each run's own bus.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager

import anyio
from anyio.abc import TaskGroup

from fleetbus.bus.base import Delivery, Subscription, WorkBus
from fleetbus.bus.streams import OBSERVATION_LEASE_SECONDS
from fleetbus.concurrency.compact_tasks import CompactTasks
from fleetbus.concurrency.loop_clock import get_clock
from fleetbus.concurrency.notifier import Notifier
from fleetbus.concurrency.task_pool import TaskPool
from fleetbus.delivery.fair_shares import FairShares, Share
from fleetbus.delivery.slots import handle
from fleetbus_schemas import SlotShare

IDLE_AFTER_SECONDS = 0.05
"""A consumer that was asked and gives nothing for so long has nothing: its slot is another run's."""

ASKED_PART = 16
"""Of the slots a consumer is asked for one in so many at a time, and for one at least: a run of little to do keeps no more of
them waiting."""

EXTEND_SECONDS = OBSERVATION_LEASE_SECONDS / 3
"""Between extensions of the lease of what waits for a slot."""

Working = TaskGroup | TaskPool | CompactTasks


class _Source:
    """One consumer of a run. Idle, it has credits which count as no slots."""

    def __init__(self, subscription: Subscription) -> None:
        self.subscription = subscription
        self.in_flight = 0
        self.is_idle = self.is_waiting = False
        """It has nothing; it has a delivery for which there is no slot."""
        self.asking = anyio.CancelScope()
        """Its deadline is when the consumer counts as idle."""

    @property
    def held(self) -> int:
        return self.in_flight + self.is_waiting + (0 if self.is_idle else self.subscription.credits)


class RunSlots:
    """The slots of one run in a shared worker. ``work`` handles one delivery to its end; what it leaves comes again."""

    def __init__(self, shared: SharedSlots, run: str, bus: WorkBus, work: Callable[[Delivery], Awaitable[None]]) -> None:
        self._shared = shared
        self._run = run
        self._bus = bus
        self._work = work
        self._sources: list[_Source] = []
        self._slot_freed = Notifier()
        self._is_pulling = False
        self._now = get_clock()
        self.in_flight = 0

    async def run(self, sources: dict[str, int], drain: anyio.Event, working: Working) -> None:
        """Pull from each consumer until ``drain`` is set; what was pulled continues in ``working``. The consumers share what
        the run gets, whatever number is beside them."""
        self._is_pulling = True
        try:
            async with anyio.create_task_group() as pulling:
                for consumer in sources:
                    pulling.start_soon(self._pull, consumer, working)
                await drain.wait()
                pulling.cancel_scope.cancel()
        finally:
            self._is_pulling = False
            self._sources.clear()
            self._shared.fill()

    async def wait_until_idle(self) -> None:
        """Return when nothing is in work."""
        while self.in_flight:
            await self._slot_freed.wait()

    @property
    def held(self) -> int:
        """Slots in use, and those kept for what was asked for just now."""
        return self.in_flight + sum(source.held - source.in_flight for source in self._sources)

    @property
    def wants_more(self) -> bool:
        """True if a consumer has not said by its silence that it has nothing."""
        return any(not source.is_idle for source in self._sources)

    def can_ask(self, most: int) -> bool:
        return self._find_source(most) is not None

    def ask(self, most: int) -> None:
        """Ask for one delivery more: the consumer with the least in work, so that neither starves the other."""
        source = self._find_source(most)
        assert source is not None
        source.subscription.grant(1)
        source.asking.deadline = self._now() + IDLE_AFTER_SECONDS

    def _find_source(self, most: int) -> _Source | None:
        askable = [each for each in self._sources if not each.is_idle and each.subscription.credits < most]
        return min(askable, key=lambda each: each.held, default=None)

    async def _pull(self, consumer: str, working: Working) -> None:
        async with self._bus.pull(consumer, credits=0) as subscription:
            source = _Source(subscription)
            self._sources.append(source)
            self._shared.fill()
            while True:
                delivery = await self._receive(source)
                if not self._shared.has_room(self._run):
                    await self._wait_for_room(source, delivery)
                self.in_flight += 1
                source.in_flight += 1
                working.start_soon(self._run_delivery, delivery, source)
                self._shared.fill()

    async def _wait_for_room(self, source: _Source, delivery: Delivery) -> None:
        """Keep a delivery until it has a slot; handed back if this is cancelled before."""
        source.is_waiting = True
        self._shared.fill()
        try:
            while not self._shared.has_room(self._run):
                with anyio.move_on_after(EXTEND_SECONDS) as pause:
                    await self._shared.wait_for_change()
                if pause.cancelled_caught:
                    await delivery.extend()
        except anyio.get_cancelled_exc_class():
            with anyio.CancelScope(shield=True):
                await delivery.nak()
            raise
        finally:
            source.is_waiting = False

    async def _receive(self, source: _Source) -> Delivery:
        """The next delivery. Asked in vain for a while, the consumer is idle until it comes."""
        while True:
            waits = not source.is_idle and source.subscription.credits
            with anyio.CancelScope(deadline=self._now() + IDLE_AFTER_SECONDS if waits else math.inf) as source.asking:
                delivery = await source.subscription.receive()
                source.is_idle = False
                return delivery
            source.is_idle = True
            self._shared.fill()

    async def _run_delivery(self, delivery: Delivery, source: _Source) -> None:
        """One delivery, one slot, one task; the slot is free again when this returns."""
        try:
            await handle(self._work, delivery)
        finally:
            self.in_flight -= 1
            source.in_flight -= 1
            self._slot_freed.notify()
            self._shared.fill()


class SharedSlots:
    """All slots of the process, and who has them. ``by_run`` are the shares that were agreed; a run has part in them from when
    it joins until it leaves."""

    def __init__(self, slots: int, by_run: Mapping[str, Share]) -> None:
        self._shares = FairShares(slots)
        self._runs: dict[str, RunSlots] = {}
        self._by_run = by_run
        self._most_asked = max(slots // ASKED_PART, 1)
        self._joined: set[str] = set()
        self._changed = Notifier()

    @contextmanager
    def join(self, run: str, bus: WorkBus, work: Callable[[Delivery], Awaitable[None]]) -> Iterator[RunSlots]:
        """The slots of a run for the length of the block; afterwards they are the others'."""
        slots = self._runs[run] = RunSlots(self, run, bus, work)
        self._shares.add(run, self._by_run[run])
        self._joined.add(run)
        try:
            yield slots
        finally:
            del self._runs[run]
            self._shares.remove(run)
            self.fill()

    def is_served(self, run: str) -> bool:
        """True while the run has part in the slots."""
        return run in self._runs

    def take_joined(self, run: str) -> bool:
        """True if the run has joined since this was last asked."""
        joined = run in self._joined
        self._joined.discard(run)
        return joined

    def has_room(self, run: str) -> bool:
        """True if one more delivery of the run has a slot. Those that were asked for have; on credits of an idle time more may
        come."""
        quota = self._by_run[run].quota or self._shares.slots
        return sum(each.in_flight for each in self._runs.values()) < self._shares.slots and self._runs[run].in_flight < quota

    def fill(self) -> None:
        """Ask for as much as there are free slots, for whoever's turn it is, once those that wait for one have it."""
        self._changed.notify()
        for run, slots in self._runs.items():
            self._shares.update(run, held=slots.held, wants_more=slots.wants_more)
        while chosen := self._shares.choose(run for run, slots in self._runs.items() if slots.can_ask(self._most_asked)):
            self._runs[chosen].ask(self._most_asked)

    async def wait_for_change(self) -> None:
        """Until a slot may have become free."""
        await self._changed.wait()

    def describe(self, run: str) -> SlotShare:
        """A run's share as heartbeats tell it; of the others only what they use together, for they may be somebody else's."""
        share = self._by_run[run]
        others = sum(slots.in_flight for name, slots in self._runs.items() if name != run)
        return SlotShare(
            slots=self._shares.slots,
            weight=share.weight,
            weights=self._shares.sum_weights(),
            quota=share.quota,
            used_by_others=others,
        )

    def count_slots(self, run: str) -> int:
        """The slots that a run would have at the moment if it wanted all that it can get: at least those that it uses."""
        return max(self._runs[run].in_flight, round(self._shares.compute_targets(wanting=run)[run]))
