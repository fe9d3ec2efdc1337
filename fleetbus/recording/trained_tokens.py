"""The trainer's side of a run's tokens: by episode, from the token records that the log's steps name."""

from __future__ import annotations

import sys
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from fleetbus.bus.base import StreamEntry
from fleetbus.core.training.joined_policies import JoinedPolicies
from fleetbus.core.training.lineage import compute_surviving_steps, is_surviving
from fleetbus.log.stored_entries import read_stored
from fleetbus.recording.token_record import TrainedTokens, build_record_path, read_record
from fleetbus_schemas import LineageStarted, StepTrained

STEPS_HELD = 8
"""Steps whose records are in memory: episodes are read about in the order in which they were trained."""


class _Record(NamedTuple):
    lineage: str
    step: int
    digest: bytes


class TrainedTokensIndex:
    """Call `add` with the learner's entries, then `find`. ``folder`` holds the records; of more than ``max_episodes`` those
    that were trained first are forgotten."""

    def __init__(self, folder: Path, *, max_episodes: int = sys.maxsize) -> None:
        self._folder = folder
        self._max_episodes = max_episodes
        self._joined = JoinedPolicies()
        self._lineages: list[LineageStarted] = []
        self._records: dict[str, list[_Record]] = {}
        self._read = lru_cache(STEPS_HELD)(self._read_step)

    def add(self, entry: StreamEntry) -> None:
        """Enter one of the learner's entries; others are left out."""
        message = read_stored(entry)
        if self._joined.covers(entry.subject, message):
            return
        match message:
            case LineageStarted() as started:
                self._lineages.append(started)
            case StepTrained() as step if step.token_record:
                record = _Record(step.lineage, step.step, step.token_record)
                for episode in step.episodes:
                    self._records.setdefault(episode, []).append(record)
                while len(self._records) > self._max_episodes:
                    del self._records[next(iter(self._records))]

    def find(self, episode_id: str) -> TrainedTokens | None:
        """The trained tokens of an episode; None if it was not trained, or no record of its step is kept here."""
        surviving = compute_surviving_steps(self._lineages)
        counted = [each for each in self._records.get(episode_id, []) if is_surviving(surviving, each.lineage, each.step)]
        return self._read(*counted[-1]).get(episode_id) if counted else None

    def _read_step(self, lineage: str, step: int, digest: bytes) -> dict[str, TrainedTokens]:
        record = read_record(build_record_path(self._folder, lineage, step), digest)
        return {each.episode_id: each for each in record.episodes} if record is not None else {}
