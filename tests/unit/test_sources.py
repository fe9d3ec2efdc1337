"""Sources of entries for commands: what is left early is closed, not left to the end of the loop."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from fleetbus_workers.run_access.sources import Source


class Scanned:
    """As much of a bus as a scan takes."""

    def __init__(self) -> None:
        self.closed = False

    async def scan(self, _subjects: list[str]) -> AsyncGenerator[int]:
        try:
            for number in range(10):
                yield number
        finally:
            self.closed = True


async def test_a_scan_that_is_left_early_is_closed_with_its_entries() -> None:
    bus: Any = Scanned()
    async with aclosing(Source("r", bus=bus).entries(["fb.r.>"])) as entries:
        assert await anext(entries) == 0
    assert bus.closed
