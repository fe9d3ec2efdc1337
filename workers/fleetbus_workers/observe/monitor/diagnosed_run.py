"""The diagnosis of the run that the page shows: brought up to date when somebody asks, and not more often than it may cost.

Entries are folded in a thread, from where the fold ends; another log, or one that went back in time, is folded anew. Of a long
log no request waits for all: each folds for some seconds, and says how far it came.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from functools import partial

import anyio
import anyio.to_thread
import msgspec

from fleetbus.bus.base import LogBus, StreamEntry
from fleetbus.core.diagnosis.diagnose import diagnose
from fleetbus.core.diagnosis.findings import Diagnosis
from fleetbus.core.diagnosis.fold import DiagnosisFold
from fleetbus.log.stored_entries import read_stored
from fleetbus_schemas import Subjects

SECONDS_BETWEEN = 30.0
TIMES_ITS_COST = 10.0
"""The next one begins no sooner than so many times the seconds that the last one took."""

READ_SECONDS = 10.0
"""A request folds so long."""

BATCH_ENTRIES = 500
MAX_ENTRIES = 2_000_000
"""A longer log is diagnosed by the command: the page would hold too much of it."""


class Diagnosed(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to the page; ``problem``: why there is no ``diagnosis``."""

    diagnosis: Diagnosis | None = None
    problem: str = ""


class DiagnosedRun:
    """The diagnosis of one run."""

    def __init__(self, bus: LogBus, subjects: Subjects, policy: str) -> None:
        self._bus = bus
        self._subjects = subjects
        self._train = subjects.train(policy)
        self._lock = anyio.Lock()
        self._fold, self._last, self._log = DiagnosisFold(), 0, ""
        self._found: Diagnosis | None = None
        self._due = -1.0

    async def get(self) -> Diagnosed:
        """As of now, or of some seconds ago. Raises as the bus does."""
        async with self._lock:
            began = anyio.current_time()
            if self._found is not None and began < self._due:
                return Diagnosed(diagnosis=self._found)
            state = await self._bus.log_state()
            if state.last_sequence > MAX_ENTRIES:
                self._fold, self._last, self._found = DiagnosisFold(), 0, None
                return Diagnosed(problem=f"the log is too long for the page: fleetbus diagnose {self._subjects.run}")
            if state.created != self._log or state.last_sequence < self._last:
                self._fold, self._last, self._log = DiagnosisFold(), 0, state.created
            with anyio.move_on_after(READ_SECONDS) as reading:
                await self._follow()
            if reading.cancelled_caught:
                return Diagnosed(problem=f"reading the log: {self._last / max(state.last_sequence, 1):.0%}")
            self._found = await anyio.to_thread.run_sync(lambda: diagnose(self._fold.build()))
            ended = anyio.current_time()
            self._due = ended + max(SECONDS_BETWEEN, TIMES_ITS_COST * (ended - began))
            return Diagnosed(diagnosis=self._found)

    async def _follow(self) -> None:
        subjects = self._subjects
        wanted = [
            subjects.tasks(),
            subjects.observation("*", "*", "*"),
            subjects.action("*", "*"),
            subjects.episodes,
            self._train,
        ]
        batch: list[StreamEntry] = []
        entries = self._bus.scan(wanted, start=self._last + 1)
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
                self._fold.apply(message, entry.sequence, entry.time_ns)
            self._last = max(self._last, entry.sequence)
