"""What can go wrong between a worker and the in-memory server: the hooks that simulations and tests override.

Every hook is asked once per event, in the order of events, so a seeded subclass makes the same faults again.
"""

from __future__ import annotations

from typing import Literal

import msgspec


class PublishFault(msgspec.Struct, frozen=True, kw_only=True):
    """One try of one publish. ``lost``: the message never arrives, or it is stored and its answer never arrives."""

    seconds_before: float = 0.0
    seconds_after: float = 0.0
    lost: Literal["", "message", "answer"] = ""


class DeliveryFault(msgspec.Struct, frozen=True, kw_only=True):
    """One delivery. ``lost``: it is leased and never arrives; ``repeated``: it is due again at once."""

    seconds: float = 0.0
    lost: bool = False
    repeated: bool = False


NO_PUBLISH_FAULT = PublishFault()
NO_DELIVERY_FAULT = DeliveryFault()


class Faults:
    """Nothing goes wrong. Subclass it to make something go wrong."""

    def draw_publish_fault(self, worker: str, subject: str) -> PublishFault:
        return NO_PUBLISH_FAULT

    def draw_delivery_fault(self, worker: str, consumer: str, subject: str) -> DeliveryFault:
        return NO_DELIVERY_FAULT

    def loses_ack(self, worker: str, consumer: str) -> bool:
        """Whether this ack, nak or extension never arrives."""
        return False

    def draw_call_delay(self, worker: str, subject: str) -> float | None:
        """Seconds that a core message is under way, None if it is lost."""
        return 0.0
