"""The network of a simulation: seeded delays, losses and repetitions of single messages, all written down.

Asked by the server in memory once per event, in the order of events; see `fleetbus.bus.memory_faults`.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Callable

import anyio

from fleetbus.bus.memory_faults import NO_DELIVERY_FAULT, NO_PUBLISH_FAULT, DeliveryFault, Faults, PublishFault
from fleetbus.concurrency.notifier import Notifier
from tests.simulation.observer import Observer
from tests.simulation.scenario.shape import NetworkFaultRates

READS_LOST_SECONDS = 120.0
"""Reads get lost in so many first seconds: where deadlines are short, nothing would ever be trained otherwise."""


class SeededNetworkFaults(Faults):
    """Faults at the rates of ``rates``, the same ones for each seed. `run` has to be running for what is stored late."""

    def __init__(self, rates: NetworkFaultRates, seed: int, observer: Observer) -> None:
        self._rates = rates
        self._draw = random.Random(f"noise/{seed}")
        self._more = random.Random(f"replicas/{seed}")
        self._reads = random.Random(f"lost reads/{seed}")
        self._observer = observer
        self._is_silent = rates == NetworkFaultRates()
        self._later: list[tuple[float, int, Callable[[], None]]] = []
        self._put_off = 0
        self._changed = Notifier()

    def heal(self) -> None:
        """From now on the network delays, loses and repeats nothing."""
        self._rates, self._is_silent = NetworkFaultRates(), True

    async def run(self) -> None:
        """Store what is late, until cancelled."""
        while True:
            wait = self._later[0][0] - anyio.current_time() if self._later else math.inf
            with anyio.move_on_after(wait):
                await self._changed.wait()
            while self._later and self._later[0][0] <= anyio.current_time():
                heapq.heappop(self._later)[2]()

    def postpone(self, seconds: float, action: Callable[[], None]) -> None:
        self._put_off += 1
        heapq.heappush(self._later, (anyio.current_time() + seconds, self._put_off, action))
        self._changed.notify()

    def draw_read_lag(self, worker: str, subject: str) -> float:
        if not self._rates.read_behind or self._more.random() >= self._rates.read_behind:
            return 0.0
        return self._more.random() * self._rates.longest_lag_seconds

    def loses_read(self, subject: str) -> bool:
        """True if this question, or its answer, gets lost on its way."""
        if not self._rates.read_lost or anyio.current_time() > READS_LOST_SECONDS:
            return False
        if self._reads.random() >= self._rates.read_lost:
            return False
        self._observer.disturb_message("read_lost", subject)
        return True

    def draw_publish_fault(self, worker: str, subject: str) -> PublishFault:
        if self._is_silent:
            return NO_PUBLISH_FAULT
        if self._rates.publish_late and self._more.random() < self._rates.publish_late:
            self._observer.disturb_message("publish_late", subject)
            seconds = self._more.random() * self._rates.longest_late_seconds
            return PublishFault(lost="message", stored_after=seconds)
        chance = self._draw.random()
        if chance < self._rates.publish_lost:
            self._observer.disturb_message("publish_lost", subject)
            return PublishFault(lost="message", seconds_before=self.seconds())
        if chance < self._rates.publish_lost + self._rates.answer_lost:
            self._observer.disturb_message("answer_lost", subject)
            return PublishFault(lost="answer", seconds_before=self.seconds())
        before, after = self.seconds(), self.seconds()
        return PublishFault(seconds_before=before, seconds_after=after) if before or after else NO_PUBLISH_FAULT

    def draw_delivery_fault(self, worker: str, consumer: str, subject: str) -> DeliveryFault:
        if not self.has_leader:
            return DeliveryFault(lost=True)
        if self._is_silent:
            return NO_DELIVERY_FAULT
        chance = self._draw.random()
        if chance < self._rates.delivery_lost:
            self._observer.disturb_message("delivery_lost", subject)
            return DeliveryFault(lost=True)
        if chance < self._rates.delivery_lost + self._rates.delivery_repeated:
            self._observer.disturb_message("delivery_repeated", subject)
            return DeliveryFault(repeated=True, seconds=self.seconds())
        seconds = self.seconds()
        return DeliveryFault(seconds=seconds) if seconds else NO_DELIVERY_FAULT

    def draw_call_delay(self, worker: str, subject: str) -> float | None:
        if self._rates.call_lost and self._draw.random() < self._rates.call_lost:
            return None
        return self.seconds()

    def loses_ack_message(self, subject: str) -> bool:
        """True if an ack, nak or extension of a delivery of this subject gets lost on its way."""
        if not self.has_leader:
            return True
        if not self._rates.ack_lost or self._draw.random() >= self._rates.ack_lost:
            return False
        self._observer.disturb_message("ack_lost", subject)
        return True

    def seconds(self) -> float:
        """How long one message is under way."""
        if not self._rates.delayed or self._draw.random() >= self._rates.delayed:
            return 0.0
        return self._draw.random() ** 2 * self._rates.longest_delay_seconds
