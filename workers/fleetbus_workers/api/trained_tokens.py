"""The trainer's side of a run's tokens: by episode, from the token records that the log's steps name."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from fleetbus.bus.base import StreamEntry
from fleetbus.core.training.lineage import compute_surviving_steps, is_surviving
from fleetbus.log.stored_entries import read_stored
from fleetbus.recording.token_record import TrainedTokens, build_record_path, read_record
from fleetbus_schemas import LineageStarted, StepTrained

STEPS_HELD = 8
"""Steps whose records are in memory: episodes are read about in the order in which they were trained."""


class TrainedTokensIndex:
    """Call `add` with the learner's entries, then `find`. ``folder`` holds the records."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lineages: list[LineageStarted] = []
        self._steps: dict[str, list[StepTrained]] = {}
        self._read = lru_cache(STEPS_HELD)(self._read_step)

    def add(self, entry: StreamEntry) -> None:
        """Enter one of the learner's entries; others are left out."""
        match read_stored(entry):
            case LineageStarted() as started:
                self._lineages.append(started)
            case StepTrained() as step if step.token_record:
                for episode in step.episodes:
                    self._steps.setdefault(episode, []).append(step)

    def find(self, episode_id: str) -> TrainedTokens | None:
        """The trained tokens of an episode; None if it was not trained, or no record of its step is kept here."""
        surviving = compute_surviving_steps(self._lineages)
        counted = [step for step in self._steps.get(episode_id, []) if is_surviving(surviving, step.lineage, step.step)]
        return self._read(counted[-1].lineage, counted[-1].step, counted[-1].token_record).get(episode_id) if counted else None

    def _read_step(self, lineage: str, step: int, digest: bytes) -> dict[str, TrainedTokens]:
        record = read_record(build_record_path(self._folder, lineage, step), digest)
        return {each.episode_id: each for each in record.episodes} if record is not None else {}
