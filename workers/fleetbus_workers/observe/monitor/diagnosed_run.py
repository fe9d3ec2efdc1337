"""The diagnosis of the run that the page shows: brought up to date when somebody asks, and not more often than it may cost.

Of a long log no request waits for all: each folds for some seconds, and says how far it came.
"""

from __future__ import annotations

import anyio
import anyio.to_thread
import msgspec

from fleetbus.bus.base import LogBus
from fleetbus.core.diagnosis.diagnose import diagnose
from fleetbus.core.diagnosis.findings import Diagnosis
from fleetbus.core.diagnosis.fold import DiagnosisFold
from fleetbus_schemas import Subjects
from fleetbus_workers.observe.monitor.followed_log import FollowedLog

SECONDS_BETWEEN = 30.0
TIMES_ITS_COST = 10.0
"""The next one begins no sooner than so many times the seconds that the last one took."""

READ_SECONDS = 10.0
"""A request folds so long."""

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
        self._lock = anyio.Lock()
        wanted = [
            subjects.tasks(),
            subjects.observation("*", "*", "*"),
            subjects.action("*", "*"),
            subjects.episodes,
            subjects.train(policy),
        ]
        self._followed = FollowedLog(wanted, DiagnosisFold)
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
                self._followed.forget()
                self._found = None
                return Diagnosed(problem=f"the log is too long for the page: fleetbus diagnose {self._subjects.run}")
            share = await self._followed.advance(self._bus, state, READ_SECONDS)
            if share < 1:
                return Diagnosed(problem=f"reading the log: {share:.0%}")
            self._found = await anyio.to_thread.run_sync(lambda: diagnose(self._followed.fold.build()))
            ended = anyio.current_time()
            self._due = ended + max(SECONDS_BETWEEN, TIMES_ITS_COST * (ended - began))
            return Diagnosed(diagnosis=self._found)
