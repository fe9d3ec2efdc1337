"""A trainer for simulations that holds every batch to the log: each sampled token once, after what it was sampled after.

What is right is worked out here from the Actions alone, by plain lists of ids, and not by the fold that the learner uses.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from fleetbus.config.settings import Configuration
from fleetbus.core.algorithms.advantages import ADVANTAGES
from fleetbus.core.episode.history import Turn
from fleetbus_schemas.tokens import unpack_ids, unpack_logprobs
from fleetbus_workers.learner.base import TrainingSequence
from fleetbus_workers.learner.scripted import ScriptedTrainer
from tests.simulation.judge.episode_checker import EpisodeRecord
from tests.simulation.observer import Observer

TrainedToken = tuple[bytes, int, float]
"""The ids before a token, the token, its log-probability."""


class CheckedTrainer(ScriptedTrainer):
    """``record`` is what the log says of each episode. Once it lost entries, results may be read that it has not: no step of
    such a batch can be stored, and none is checked here."""

    def __init__(self, observer: Observer, record: Mapping[str, EpisodeRecord], configuration: Configuration) -> None:
        super().__init__()
        self._observer = observer
        self._record = record
        self._learner, self._algorithm = configuration.learner, configuration.algorithm

    def train(self, batch: Sequence[TrainingSequence], *, version: int, progress: float) -> dict[str, float]:
        leaves: dict[str, list[TrainingSequence]] = {}
        for sequence in batch:
            leaves.setdefault(sequence.episode_id, []).append(sequence)
        if self._observer.judged is None:
            self._check(leaves)
        return super().train(batch, version=version, progress=progress)

    def _check(self, leaves: Mapping[str, Sequence[TrainingSequence]]) -> None:
        for episode, sequences in leaves.items():
            expected = Counter(list_sampled_tokens(self._find_turns(episode)))
            trained = Counter(token for sequence in sequences for token in list_trained_tokens(sequence))
            name = f"{episode}: {len(sequences)} leaves, {trained.total()} of {expected.total()} tokens"
            self._observer.require(trained <= expected, "a sampled token is trained once", name)
            is_masked = self._algorithm.mask_truncated_completions and not trained
            self._observer.require(trained >= expected or is_masked, "every sampled token is trained", name)
        if self._algorithm.credit_assignment == "episode":
            self._check_advantages(leaves)

    def _find_turns(self, episode: str) -> tuple[Turn, ...]:
        record = self._record[episode]
        assert record.result is not None
        return record.history(record.result.attempt)[: record.result.turns]

    def _check_advantages(self, leaves: Mapping[str, Sequence[TrainingSequence]]) -> None:
        """A group's advantages come from one reward per episode, however many leaves it has."""
        rewards = [self._read_reward(episode) for episode in leaves]
        numbers: dict[str, int] = {}
        groups = [numbers.setdefault(sequences[0].group_id, len(numbers)) for sequences in leaves.values()]
        estimate = ADVANTAGES[self._learner.advantage_estimator]
        expected = estimate(np.array(rewards), np.array(groups), minimum=self._learner.min_group_size)
        for (episode, sequences), advantage in zip(leaves.items(), expected, strict=True):
            given = np.concatenate([sequence.advantages[sequence.loss_mask] for sequence in sequences])
            right = np.allclose(given, advantage, atol=1e-6)
            self._observer.require(right, "an episode's reward is counted once", f"{episode}: {set(given)}, not {advantage}")

    def _read_reward(self, episode: str) -> float:
        result = self._record[episode].result
        assert result is not None and result.reward is not None
        return result.reward


def list_sampled_tokens(turns: Sequence[Turn]) -> list[TrainedToken]:
    """Every token that the turns sampled, after the ids of its segment before it."""
    segments: list[list[int]] = []
    sampled = []
    for turn in turns:
        action, origin = turn.action, turn.action.origin
        if action.segment == len(segments):
            segments.append(segments[origin.parent][: origin.kept] if origin is not None and origin.parent >= 0 else [])
        ids = segments[action.segment]
        ids += unpack_ids(action.prompt_delta)
        for token, logprob in zip(unpack_ids(action.sampled), unpack_logprobs(action.logprobs), strict=True):
            sampled.append((np.array(ids, np.int32).tobytes(), token, logprob))
            ids.append(token)
    return sampled


def list_trained_tokens(sequence: TrainingSequence) -> list[TrainedToken]:
    """Every token of a sequence that is trained, after the ids before it."""
    return [
        (sequence.ids[:place].tobytes(), int(sequence.ids[place]), float(sequence.logprobs[place]))
        for place in np.flatnonzero(sequence.loss_mask)
    ]
