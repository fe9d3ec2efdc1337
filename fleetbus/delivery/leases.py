"""Extends the ack deadline of deliveries in progress: one timer per worker for all of them (docs/concepts/delivery.md, rule 5).

Compute never runs on the event loop, so nothing here can be held up by it.
"""

import math

import anyio

from fleetbus.bus.base import Delivery
from fleetbus.concurrency.loop_clock import get_clock


class Leases:
    """Deliveries in work, by the key that their handler chose. ``lease_seconds`` is after which time without an extension the
    server gives one to somebody else: to extend it later would keep it from those who wait for that one's end."""

    def __init__(self, interval_seconds: float, lease_seconds: float = math.inf) -> None:
        self._interval_seconds = interval_seconds
        self._lease_seconds = lease_seconds
        self._held: dict[str, Delivery] = {}
        self._lapsed: set[str] = set()
        """Keys whose delivery was not extended in time, because this process was stopped."""

    def hold(self, key: str, delivery: Delivery) -> None:
        """Extend this delivery from now on, instead of an earlier one with the same key."""
        self._held[key] = delivery
        self._lapsed.discard(key)

    def get(self, key: str) -> Delivery | None:
        """The newest delivery of that key, still held."""
        return self._held.get(key)

    def take(self, key: str) -> Delivery | None:
        """The newest delivery of that key, which is no longer extended."""
        self._lapsed.discard(key)
        return self._held.pop(key, None)

    async def run(self) -> None:
        """Extend all held deliveries until cancelled."""
        now = get_clock()
        extended_at = now()
        while True:
            await anyio.sleep(self._interval_seconds)
            for key, delivery in tuple(self._held.items()):
                if now() - extended_at > self._lease_seconds:
                    self._lapsed |= self._held.keys()
                if key not in self._lapsed:
                    await delivery.extend()
            extended_at = now()
