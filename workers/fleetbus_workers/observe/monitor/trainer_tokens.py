"""The trainer's side of an episode's tokens for the page: the token records in the run's folder that the log names.

The learner's entries are read when an episode is asked for, each time from where the last time ended.
"""

from __future__ import annotations

from pathlib import Path

import anyio
import anyio.to_thread

from fleetbus.bus.base import LogBus
from fleetbus.recording.token_record import TrainedTokens
from fleetbus.recording.trained_tokens import TrainedTokensIndex
from fleetbus_schemas import Subjects
from fleetbus_workers.observe.run.state import KEPT_EPISODES


class TrainerTokens:
    """``folder`` has the records, if it is there: they are on the learner's machine."""

    def __init__(self, bus: LogBus, subjects: Subjects, folder: Path) -> None:
        self._bus = bus
        self._subjects = subjects
        self._folder = folder
        self._index = TrainedTokensIndex(folder, max_episodes=KEPT_EPISODES)
        self._last_sequence = 0
        self._lock = anyio.Lock()

    async def find(self, episode_id: str) -> TrainedTokens | None:
        """The trained tokens of an episode; None without a record. Raises as the bus does."""
        if not await anyio.Path(self._folder).is_dir():
            return None
        async with self._lock:
            async for entry in self._bus.scan([self._subjects.train("*")], start=self._last_sequence + 1):
                self._index.add(entry)
                self._last_sequence = entry.sequence
            return await anyio.to_thread.run_sync(self._index.find, episode_id)
