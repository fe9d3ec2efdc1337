"""Extends the ack deadline of deliveries in progress: one timer per worker for all of them (delivery rule 5).

Compute never runs on the event loop, so nothing here can be held up by it.
"""

from __future__ import annotations

import anyio

from fleetbus.bus.base import Delivery


class Leases:
    """Deliveries in work, by the key that their handler chose."""

    def __init__(self, interval_seconds: float) -> None:
        self._interval_seconds = interval_seconds
        self._held: dict[str, Delivery] = {}

    def hold(self, key: str, delivery: Delivery) -> None:
        """Extend this delivery from now on, instead of an earlier one with the same key."""
        self._held[key] = delivery

    def get(self, key: str) -> Delivery | None:
        """The newest delivery of that key, still held."""
        return self._held.get(key)

    def take(self, key: str) -> Delivery | None:
        """The newest delivery of that key, which is no longer extended."""
        return self._held.pop(key, None)

    async def run(self) -> None:
        """Extend all held deliveries until cancelled."""
        while True:
            await anyio.sleep(self._interval_seconds)
            for delivery in tuple(self._held.values()):
                await delivery.extend()
