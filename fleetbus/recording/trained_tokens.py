"""The trainer's side of a run's tokens: by episode, from the token records that the log's steps name.

Where several policies are trained, each learner has records of its own policy's seats
(`fleetbus.config.run_folder.policy_folder`).
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from fleetbus.bus.base import StreamEntry
from fleetbus.config.seats import POLICIES
from fleetbus.core.training.lineage import compute_surviving_steps, is_surviving
from fleetbus.log.stored_entries import read_stored
from fleetbus.recording.token_record import TrainedTokens, build_record_path, read_record
from fleetbus_schemas import LineageStarted, StepTrained
from fleetbus_schemas.tokens import pack_mask, unpack_ids, unpack_mask

STEPS_HELD = 8
"""Steps whose records are in memory: episodes are read about in the order in which they were trained."""


class _Record(NamedTuple):
    policy: str
    lineage: str
    step: int
    digest: bytes


class TrainedTokensIndex:
    """Call `add` with the learners' entries, then `find`. ``folder`` holds the records of the run's policy; of more than
    ``max_episodes`` those that were trained first are forgotten."""

    def __init__(self, folder: Path, *, max_episodes: int = sys.maxsize) -> None:
        self._folder = folder
        self._max_episodes = max_episodes
        self._lineages: defaultdict[str, list[LineageStarted]] = defaultdict(list)
        self._records: dict[str, list[_Record]] = {}
        self._read = lru_cache(STEPS_HELD)(self._read_step)

    def add(self, entry: StreamEntry) -> None:
        """Enter one of a learner's entries; others are left out."""
        policy = entry.subject.rpartition(".")[2]
        match read_stored(entry):
            case LineageStarted() as started:
                self._lineages[policy].append(started)
            case StepTrained() as step if step.token_record:
                record = _Record(policy, step.lineage, step.step, step.token_record)
                for episode in step.episodes:
                    self._records.setdefault(episode, []).append(record)
                while len(self._records) > self._max_episodes:
                    del self._records[next(iter(self._records))]

    def find(self, episode_id: str) -> TrainedTokens | None:
        """The trained tokens of an episode; None if it was not trained, or no record of its step is kept here."""
        counted = {each.policy: each for each in self._records.get(episode_id, ()) if self._counts(each)}
        found = [tokens for each in counted.values() if (tokens := self._read(*each).get(episode_id)) is not None]
        return merge_tokens(found) if found else None

    def _counts(self, record: _Record) -> bool:
        return is_surviving(compute_surviving_steps(self._lineages[record.policy]), record.lineage, record.step)

    def _read_step(self, policy: str, lineage: str, step: int, digest: bytes) -> dict[str, TrainedTokens]:
        own = self._folder.parent / POLICIES / policy / self._folder.name
        record = read_record(build_record_path(own if own.is_dir() else self._folder, lineage, step), digest)
        return {each.episode_id: each for each in record.episodes} if record is not None else {}


def merge_tokens(parts: Sequence[TrainedTokens]) -> TrainedTokens:
    """The tokens of one episode that several learners have trained, each its own, with the version of the first."""
    first, *others = parts
    if not others:
        return first
    clipped = [bit for part in parts for bit in unpack_mask(part.clipped, len(unpack_ids(part.places)))]
    return TrainedTokens(
        episode_id=first.episode_id,
        version=first.version,
        places=b"".join(part.places for part in parts),
        logprobs=b"".join(part.logprobs for part in parts),
        gradients=b"".join(part.gradients for part in parts),
        clipped=pack_mask(clipped),
    )
