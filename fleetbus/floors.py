"""How far the log may be trimmed without taking a message from a consumer that has not acked it.

A consumer's own ``ack_floor`` does not say: it stands still while the consumer is idle, so the lowest of them all never moves,
and leaving idle consumers out trims what they have yet to deliver - silently, for a purge over un-acked messages warns nobody.
"""

from __future__ import annotations

from collections.abc import Callable

import anyio

from fleetbus.bus.base import Bus, ConsumerFloor
from fleetbus.together import together

LOOKS_AT_A_TIME = 16
MAX_LOOKS = 256
"""Ignorable messages that are passed over per consumer and call."""


def _never(_subject: str) -> bool:
    return False


class _Search:
    """The lowest floor found so far; consumers whose next message lies above it need not be asked."""

    def __init__(self, bus: Bus, limit: int, is_ignorable: Callable[[str], bool]) -> None:
        self._bus = bus
        self._is_ignorable = is_ignorable
        self.lowest = limit

    async def look(self, consumer: ConsumerFloor) -> None:
        start = consumer.ack_floor + 1
        for _ in range(MAX_LOOKS):
            if start > self.lowest:
                return
            entry = await self._bus.next_entry(consumer.filter, start=start)
            if entry is None:
                return
            if not self._is_ignorable(entry.subject):
                self.lowest = min(self.lowest, entry.sequence - 1)
                return
            start = entry.sequence + 1
        self.lowest = min(self.lowest, start - 1)


async def safe_floor(bus: Bus, *, limit: int, is_ignorable: Callable[[str], bool] = _never) -> int:
    """The last sequence up to ``limit`` below which every consumer has acked all that its filter lets through.

    Per consumer: the entry before the next message of its filter after its ``ack_floor``; if there is none, the end of the log
    as it was before anybody was asked. Messages on subjects that are ignorable hold nobody back: without that, a message that
    a dead worker took along on a lane of its own would stop all trimming until somebody takes the lane over.
    """
    search = _Search(bus, min(limit, await bus.last_sequence()), is_ignorable)
    limiter = anyio.CapacityLimiter(LOOKS_AT_A_TIME)

    async def look(consumer: ConsumerFloor) -> None:
        async with limiter:
            await search.look(consumer)

    async with together() as group:
        for consumer in await bus.consumer_floors():
            group.start_soon(look, consumer)
    return search.lowest
