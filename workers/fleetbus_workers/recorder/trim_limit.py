"""The limit of trimming: the last sequence below which no consumer has an un-acked message.

A consumer's own ``ack_floor`` does not say: it stands still while the consumer is idle, so the lowest of them all never moves,
and leaving idle consumers out trims what they have yet to deliver - silently, for a purge over un-acked messages raises no
warning.
"""

from __future__ import annotations

from collections.abc import Callable

import anyio

from fleetbus.bus.base import Bus, ConsumerFloor, LogBus
from fleetbus.concurrency.task_groups import open_first_error_task_group

PARALLEL_LOOKUPS = 16
MAX_LOOKUPS = 256
"""Ignorable messages that are passed over per consumer and call."""


class _TrimLimitSearch:
    """The lowest floor found so far; consumers whose next message lies above it need not be asked."""

    def __init__(self, bus: LogBus, limit: int, is_ignorable: Callable[[str], bool]) -> None:
        self._bus = bus
        self._is_ignorable = is_ignorable
        self.lowest = limit

    async def lower_limit(self, consumer: ConsumerFloor) -> None:
        start = consumer.ack_floor + 1
        for _ in range(MAX_LOOKUPS):
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


async def compute_trim_limit(bus: Bus, *, limit: int, is_ignorable: Callable[[str], bool]) -> int:
    """The last sequence up to ``limit`` below which every consumer has acked all that its filter lets through.

    Per consumer: the entry before the next message of its filter after its ``ack_floor``; if there is none, the end of the log
    as it was before the first query. Messages on ignorable subjects do not lower the limit: without that, a message that
    a dead worker took along on a lane of its own would stop all trimming until another worker takes the lane over.
    """
    search = _TrimLimitSearch(bus, min(limit, (await bus.log_state()).last_sequence), is_ignorable)
    limiter = anyio.CapacityLimiter(PARALLEL_LOOKUPS)

    async def lower_limit(consumer: ConsumerFloor) -> None:
        async with limiter:
            await search.lower_limit(consumer)

    async with open_first_error_task_group() as group:
        for consumer in await bus.ack_floors():
            group.start_soon(lower_limit, consumer)
    return search.lowest
