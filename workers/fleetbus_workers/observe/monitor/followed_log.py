"""A fold of a run's log that is brought up to date in parts: each time from where the last time ended, and for some seconds.

Entries are folded in a thread. Another log, or one that went back in time, is folded anew.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from functools import partial
from typing import Generic, Protocol, TypeVar

import anyio
import anyio.to_thread

from fleetbus.bus.base import LogBus, LogState, StreamEntry
from fleetbus.log.stored_entries import read_stored
from fleetbus_schemas import Message

BATCH_ENTRIES = 500


class Fold(Protocol):
    """The state that messages are applied to."""

    def apply(self, message: Message, sequence: int, time_ns: int, /) -> None:
        """Note a message."""


F = TypeVar("F", bound=Fold)


class FollowedLog(Generic[F]):
    """The ``fold`` of a log's entries on ``subjects`` so far; ``begin`` makes an empty one."""

    def __init__(self, subjects: Sequence[str], begin: Callable[[], F]) -> None:
        self._subjects = list(subjects)
        self._begin = begin
        self._log = ""
        self.forget()

    def forget(self) -> None:
        """Begin anew with the next `advance`."""
        self.fold, self._last = self._begin(), 0

    async def advance(self, bus: LogBus, state: LogState, seconds: float) -> float:
        """Read on for ``seconds`` at most. Return the share of the log that is read, 1.0 if that is all of it. Raises as the
        bus does, and then reads on from there the next time."""
        if state.created != self._log or state.last_sequence < self._last:
            self.forget()
            self._log = state.created
        with anyio.move_on_after(seconds) as reading:
            await self._follow(bus)
        return min(self._last / max(state.last_sequence, 1), 0.999) if reading.cancelled_caught else 1.0

    async def _follow(self, bus: LogBus) -> None:
        batch: list[StreamEntry] = []
        entries = bus.scan(self._subjects, start=self._last + 1)
        try:
            async for entry in entries:
                batch.append(entry)
                if len(batch) == BATCH_ENTRIES:
                    await anyio.to_thread.run_sync(partial(self._apply, batch))
                    batch = []
        finally:
            self._apply(batch)  # fewer than a batch, and all that was read when it was cut off
            if isinstance(entries, AsyncGenerator):
                await entries.aclose()

    def _apply(self, batch: list[StreamEntry]) -> None:
        for entry in batch:
            if entry.sequence > self._last and (message := read_stored(entry)) is not None:
                self.fold.apply(message, entry.sequence, entry.time_ns)
            self._last = max(self._last, entry.sequence)
