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
from fleetbus_schemas import EpisodeFinished
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
        self._policy = configuration.run.policy

    def train(self, batch: Sequence[TrainingSequence], *, version: int, progress: float) -> dict[str, float]:
        leaves: dict[str, list[TrainingSequence]] = {}
        for sequence in batch:
            leaves.setdefault(sequence.episode_id, []).append(sequence)
        if self._observer.judged is None:
            self._check(leaves)
        return super().train(batch, version=version, progress=progress)

    def _check(self, leaves: Mapping[str, Sequence[TrainingSequence]]) -> None:
        for episode, sequences in leaves.items():
            by_turn, unseated = self._list_tokens(episode), self._find_unseated(episode)
            expected = Counter(token for turn, tokens in enumerate(by_turn) if turn not in unseated for token in tokens)
            others = self._find_others(episode)
            foreign = Counter(token for turn, tokens in enumerate(by_turn) if turn in others for token in tokens)
            trained = Counter(token for sequence in sequences for token in list_trained_tokens(sequence))
            name = f"{episode}: {len(sequences)} leaves, {trained.total()} of {expected.total()} tokens"
            is_own = not trained & (foreign - expected)
            self._observer.require(is_own, "a learner trains the turns of its policy only", f"{self._policy}, {name}")
            self._observer.require(trained <= expected, "a sampled token is trained once", name)
            is_masked = self._algorithm.mask_truncated_completions and not trained
            self._observer.require(trained >= expected or is_masked, "every sampled token is trained", name)
        if self._algorithm.credit_assignment == "episode":
            self._check_advantages(leaves)

    def _list_tokens(self, episode: str) -> list[list[TrainedToken]]:
        record, result = self._record[episode], self._find_result(episode)
        return list_sampled_tokens(record.history(result.attempt)[: result.turns])

    def _find_unseated(self, episode: str) -> set[int]:
        """Turns of seats that have no reward, and those of other policies."""
        seats = self._find_result(episode).seats
        return self._find_others(episode) | {turn for seat in seats if seat.reward is None for turn in seat.turns}

    def _find_others(self, episode: str) -> set[int]:
        """Turns of seats that the request gave to other policies."""
        others = self._list_others(episode)
        return {turn for seat in self._find_result(episode).seats if seat.name in others for turn in seat.turns}

    def _list_others(self, episode: str) -> set[str]:
        request = self._record[episode].request
        players = {seat.seat: seat.policy for seat in request.seats}
        seats = {seat.name for seat in self._find_result(episode).seats}
        return {seat for seat in seats if players.get(seat, request.policy) != self._policy}

    def _check_advantages(self, leaves: Mapping[str, Sequence[TrainingSequence]]) -> None:
        """A group's advantages come from one reward per episode, or per seat of it, however many leaves it has."""
        rewards: list[tuple[float, tuple[str, str], str, set[int]]] = []
        for episode, sequences in leaves.items():
            result = self._find_result(episode)
            assert result.reward is not None
            seats = [seat for seat in result.seats if seat.name not in self._list_others(episode)]
            parts = [(seat.name, seat.reward, set(seat.turns)) for seat in seats if seat.reward is not None]
            for name, reward, turns in parts or [("", result.reward, set(range(result.turns)))]:
                rewards.append((reward, (sequences[0].group_id, name), episode, turns))
        numbers: dict[tuple[str, str], int] = {}
        groups = [numbers.setdefault(group, len(numbers)) for _, group, _, _ in rewards]
        estimate = ADVANTAGES[self._learner.advantage_estimator]
        values = np.array([reward for reward, _, _, _ in rewards])
        expected = estimate(values, np.array(groups), minimum=self._learner.min_group_size)
        for (_, _, episode, turns), advantage in zip(rewards, expected, strict=True):
            own = {token for turn, tokens in enumerate(self._list_tokens(episode)) if turn in turns for token in tokens}
            given = {value for sequence in leaves[episode] for token, value in list_advantages(sequence) if token in own}
            right = np.allclose(list(given), advantage, atol=1e-6)
            self._observer.require(right, "an episode's reward is counted once", f"{episode}: {given}, not {advantage}")

    def _find_result(self, episode: str) -> EpisodeFinished:
        result = self._record[episode].result
        assert result is not None
        return result


def list_sampled_tokens(turns: Sequence[Turn]) -> list[list[TrainedToken]]:
    """By turn every token that it sampled, after the ids of its segment before it."""
    segments: list[list[int]] = []
    sampled: list[list[TrainedToken]] = []
    for turn in turns:
        action, origin = turn.action, turn.action.origin
        if action.segment == len(segments):
            segments.append(segments[origin.parent][: origin.kept] if origin is not None and origin.parent >= 0 else [])
        ids = segments[action.segment]
        ids += unpack_ids(action.prompt_delta)
        sampled.append([])
        for token, logprob in zip(unpack_ids(action.sampled), unpack_logprobs(action.logprobs), strict=True):
            sampled[-1].append((np.array(ids, np.int32).tobytes(), token, logprob))
            ids.append(token)
    return sampled


def list_trained_tokens(sequence: TrainingSequence) -> list[TrainedToken]:
    """Every token of a sequence that is trained, after the ids before it."""
    return [token for token, _ in list_advantages(sequence)]


def list_advantages(sequence: TrainingSequence) -> list[tuple[TrainedToken, float]]:
    """The same with the advantage of each."""
    return [
        (
            (sequence.ids[:place].tobytes(), int(sequence.ids[place]), float(sequence.logprobs[place])),
            float(sequence.advantages[place]),
        )
        for place in np.flatnonzero(sequence.loss_mask)
    ]
