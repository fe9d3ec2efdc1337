"""The network of a simulation: seeded delays, losses and repetitions of single messages, all written down.

Asked by the server in memory once per event, in the order of events; see `fleetbus.bus.memory_faults`.
"""

from __future__ import annotations

import random

from fleetbus.bus.memory_faults import NO_DELIVERY_FAULT, NO_PUBLISH_FAULT, DeliveryFault, Faults, PublishFault
from fleetbus_workers.simulation.observer import Observer
from fleetbus_workers.simulation.scenario import NetworkFaultRates


class SeededNetworkFaults(Faults):
    """Faults at the rates of ``rates``, from ``draw``."""

    def __init__(self, rates: NetworkFaultRates, draw: random.Random, observer: Observer) -> None:
        self._rates = rates
        self._draw = draw
        self._observer = observer
        self._is_silent = rates == NetworkFaultRates()

    def draw_publish_fault(self, worker: str, subject: str) -> PublishFault:
        if self._is_silent:
            return NO_PUBLISH_FAULT
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
        """Whether an ack, nak or extension of a delivery of this subject gets lost on its way."""
        if not self._rates.ack_lost or self._draw.random() >= self._rates.ack_lost:
            return False
        self._observer.disturb_message("ack_lost", subject)
        return True

    def seconds(self) -> float:
        """How long one message is under way."""
        if not self._rates.delayed or self._draw.random() >= self._rates.delayed:
            return 0.0
        return self._draw.random() ** 2 * self._rates.longest_delay_seconds
