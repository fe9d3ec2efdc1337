"""Faults between a worker and the in-memory server: the hooks that simulations and tests override.

Every hook is asked once per event, in the order of events, so a seeded subclass makes the same faults again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import msgspec


class PublishFault(msgspec.Struct, frozen=True, kw_only=True):
    """One try of one publish. ``lost``: the message never arrives, or it is stored and its answer never arrives.

    ``stored_after``: a lost message is stored all the same so many seconds later, despite its sender; 0: never.
    """

    seconds_before: float = 0.0
    seconds_after: float = 0.0
    lost: Literal["", "message", "answer"] = ""
    stored_after: float = 0.0


class DeliveryFault(msgspec.Struct, frozen=True, kw_only=True):
    """One delivery. ``lost``: it is leased and never arrives; ``repeated``: it is due again at once."""

    seconds: float = 0.0
    lost: bool = False
    repeated: bool = False


NO_PUBLISH_FAULT = PublishFault()
NO_DELIVERY_FAULT = DeliveryFault()


class Faults:
    """Nothing goes wrong. Subclass it to make something go wrong."""

    has_leader = True
    """Without one, publishes, deliveries, acks and questions about streams and consumers get lost; reads are answered."""

    def draw_publish_fault(self, worker: str, subject: str) -> PublishFault:
        return NO_PUBLISH_FAULT

    def draw_delivery_fault(self, worker: str, consumer: str, subject: str) -> DeliveryFault:
        return NO_DELIVERY_FAULT

    def loses_ack(self, worker: str, consumer: str) -> bool:
        """True if this ack, nak or extension never arrives."""
        return False

    def draw_call_delay(self, worker: str, subject: str) -> float | None:
        """Seconds that a core message is under way, None if it is lost."""
        return 0.0

    def draw_read_lag(self, worker: str, subject: str) -> float:
        """Seconds by which the replica that answers a read is behind."""
        return 0.0

    def postpone(self, seconds: float, action: Callable[[], None]) -> None:
        """Do something that a publish fault put off; the server itself has no task that waits."""
        raise NotImplementedError("faults that store messages later need somebody who waits for that")
