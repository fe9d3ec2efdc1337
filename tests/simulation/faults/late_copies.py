"""Copies of requests that were on their way for very long: stored again after everything about their episode has left the log.

The server refuses none of them, for compare-and-set finds their subject empty; only the floor does.
"""

from __future__ import annotations

import random

import anyio

from fleetbus.errors import BusError
from tests.simulation.deployment.fixtures import SimulationFixtures

EVERY_SECONDS = 4.0
COPIES_AT_A_TIME = 2


class LateCopies:
    """Stores some again, now and then."""

    def __init__(self, fixtures: SimulationFixtures) -> None:
        self._fixtures = fixtures
        self._draw = random.Random(f"late/{fixtures.scenario.seed}")

    async def run(self) -> None:
        """Until cancelled."""
        fixtures = self._fixtures
        while True:
            await anyio.sleep(EVERY_SECONDS)
            log = fixtures.log
            gone = [
                record
                for record in fixtures.log_checker.episodes.record.values()
                if log.get(record.request_sequence) is None and not record.refused
            ]
            for record in self._draw.sample(gone, min(COPIES_AT_A_TIME, len(gone))):
                sequence = record.request_sequence
                original = fixtures.log_checker.entries[sequence - 1]
                fixtures.observer.disturb_message("late_copy", original.subject)
                try:
                    log.store(original.subject, original.payload, f"late-{log.last_sequence}", 0, fixtures.server.now_ns())
                except BusError as error:
                    fixtures.observer.trace("late_copy", original.subject, type(error).__name__)
