"""Slots: every delivery is worked on in its own task, and no more are pulled than slots are free (docs/concepts/lane.md)."""

from collections.abc import Awaitable, Callable

import anyio
import structlog
from anyio.abc import TaskGroup

from fleetbus.bus.base import Delivery, Subscription, WorkBus
from fleetbus.concurrency.compact_tasks import CompactTasks
from fleetbus.concurrency.notifier import Notifier
from fleetbus.concurrency.task_pool import TaskPool
from fleetbus.errors import BusClosed, BusError

log = structlog.get_logger()


async def handle(work: Callable[[Delivery], Awaitable[None]], delivery: Delivery) -> None:
    """One delivery to its end. Raises `BusClosed`; after another failure of the bus the message comes again."""
    try:
        await work(delivery)
    except BusClosed:
        raise
    except BusError as error:
        log.warning(
            "delivery handler failed; leaving the message to redelivery", subject=delivery.message.subject, reason=str(error)
        )


class Slots:
    """The slots of one worker. ``work`` handles one delivery to its end; what it leaves un-acked comes again. With ``demand``
    no more are pulled than it says at the moment; call `top_up` when it has risen. With ``ahead`` all consumers share the
    slots, and each is asked for so many deliveries at a time: an idle one keeps no more slots from the others."""

    def __init__(
        self,
        bus: WorkBus,
        work: Callable[[Delivery], Awaitable[None]],
        *,
        demand: Callable[[], int] | None = None,
        ahead: int = 0,
    ) -> None:
        self._bus = bus
        self._ahead = ahead
        self._demand = demand or ((lambda: ahead) if ahead else None)
        self._subscriptions: dict[Subscription, int] = {}
        self._work = work
        self._slot_freed = Notifier()
        self._pulling = True
        self.in_flight = 0

    async def run(self, sources: dict[str, int], drain: anyio.Event, working: TaskGroup | TaskPool | CompactTasks) -> None:
        """Pull from each consumer into its share of slots until ``drain`` is set; what was pulled continues in ``working``."""
        async with anyio.create_task_group() as pulling:
            for consumer, slots in sources.items():
                pulling.start_soon(self._pull, consumer, slots, working)
            await drain.wait()
            self._pulling = False
            pulling.cancel_scope.cancel()

    async def wait_until_idle(self) -> None:
        """Return when nothing is in work."""
        while self.in_flight:
            await self._slot_freed.wait()

    async def _pull(self, consumer: str, slots: int, working: TaskGroup | TaskPool | CompactTasks) -> None:
        async with self._bus.pull(consumer, credits=slots if self._demand is None else 0) as subscription:
            self._subscriptions[subscription] = slots
            self.top_up()
            while True:
                delivery = await subscription.receive()
                self.in_flight += 1
                working.start_soon(self._run_delivery, delivery, subscription)
                if self._ahead:
                    self.top_up()

    def top_up(self) -> None:
        """Pull as much as is in demand now, into slots that are free."""
        if self._demand is None or not self._pulling:
            return
        for subscription, slots in tuple(self._subscriptions.items()):
            asked = sum(each.credits for each in self._subscriptions) if self._ahead else subscription.credits
            wanted = min(self._demand() - subscription.credits, slots - self.in_flight - asked)
            if wanted > 0:
                subscription.grant(wanted)
                self._subscriptions[subscription] = self._subscriptions.pop(subscription)  # the next slot is another's

    async def _run_delivery(self, delivery: Delivery, subscription: Subscription) -> None:
        """One delivery, one slot, one task; the slot is free again when this returns."""
        try:
            await handle(self._work, delivery)
        finally:
            self.in_flight -= 1
            self._slot_freed.notify()
            if self._demand is not None:
                self.top_up()
            elif self._pulling:
                subscription.grant(1)
