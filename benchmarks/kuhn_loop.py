"""Kuhn poker by self-play in one process without any bus: the same trainer, settings, prompts and advantages as a run has.

Each update plays the groups of a batch side by side, a forward pass per turn for all games that go on, and trains them. What a
run records, isolates and distributes is not there; nor does sampling go on while a batch is trained.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import msgspec
import numpy as np
from transformers import PreTrainedModel

from benchmarks.kuhn_policy import DEALS, Prompts, compute_next, settle
from fleetbus.config.settings import Configuration
from fleetbus.core.algorithms.advantages import ADVANTAGES
from fleetbus_workers.assembly.trainers import build_trainer_settings
from fleetbus_workers.learner.base import TrainingSequence
from fleetbus_workers.learner.torch.trainer import TorchTrainer
from fleetbus_workers.starter.build import find_starter_folder


class Sampled(NamedTuple):
    """A turn: the ids before it, the token, its log-probability."""

    before: Sequence[int]
    token: int
    logprob: float


class Game(msgspec.Struct):
    """One episode in play; the turns of both seats in order."""

    deal: str
    group: int
    moves: str = ""
    turns: list[Sampled] = msgspec.field(default_factory=list)

    @property
    def won(self) -> int | None:
        result: int | None = settle(self.deal, self.moves)
        return result


def play_games(
    model: PreTrainedModel, prompts: Prompts, deals: Sequence[str], size: int, rng: np.random.Generator
) -> list[Game]:
    """``size`` games of each of ``deals``, group by group."""
    games = [Game(deal=deal, group=number) for number, deal in enumerate(deals) for _ in range(size)]
    while playing := [game for game in games if game.won is None]:
        rows = [_list_ids(prompts, game) for game in playing]
        probabilities = compute_next(model, rows, prompts.temperature)
        drawn = rng.random((len(playing), 1))
        tokens = (probabilities.cumsum(-1) < drawn).sum(-1).clip(max=probabilities.shape[1] - 1)
        for game, row, token, chosen in zip(playing, rows, tokens.tolist(), probabilities, strict=True):
            game.turns.append(Sampled(row, token, float(np.log(chosen[token]))))
            game.moves += "b" if prompts.bets[token] else "p"
    return games


def _list_ids(prompts: Prompts, game: Game) -> list[int]:
    card = game.deal[len(game.moves) % 2]
    return prompts.again(card, game.turns[0].token) if game.moves == "pb" else prompts.first[card, game.moves]


def build_sequences(games: Sequence[Game], estimator: str, minimum: int, temperature: float = 1.0) -> list[TrainingSequence]:
    """Two of each game, one per seat, compared with the same seat of the group."""
    rewards = np.array([[game.won, -(game.won or 0)] for game in games], np.float64)
    groups = np.array([game.group for game in games])
    advantages = [ADVANTAGES[estimator](rewards[:, seat], groups, minimum=minimum) for seat in (0, 1)]
    return [
        _build_sequence(f"e{number}", game, seat, float(advantages[seat][number]), temperature)
        for number, game in enumerate(games)
        for seat in (0, 1)
    ]


def _build_sequence(episode: str, game: Game, seat: int, advantage: float, temperature: float) -> TrainingSequence:
    turns = game.turns[seat::2]
    ids = np.array([*turns[-1].before, turns[-1].token], np.int32)
    mask, logprobs = np.zeros(len(ids), np.bool_), np.zeros(len(ids), np.float32)
    for turn in turns:
        mask[len(turn.before)], logprobs[len(turn.before)] = True, turn.logprob
    return TrainingSequence(
        episode_id=episode,
        group_id=f"g{game.group}",
        ids=ids,
        loss_mask=mask,
        logprobs=logprobs,
        advantages=np.where(mask, advantage, 0.0).astype(np.float32),
        versions=np.where(mask, 0, -1).astype(np.int32),
        temperature=temperature,
        segment=seat,
    )


def train_in_one_process(
    configuration: Configuration, *, threads: int, measure: Callable[[int, PreTrainedModel, PreTrainedModel], None]
) -> Iterator[float]:
    """Train the steps of ``configuration``, and yield the seconds that have passed after each without those of ``measure``,
    which is called with the number of the step, 0 before the first, the model and the reference."""
    learner = msgspec.structs.replace(configuration.learner, threads=threads, keep_token_records=0)
    trainer = TorchTrainer(
        find_starter_folder(), settings=build_trainer_settings(msgspec.structs.replace(configuration, learner=learner))
    )
    prompts = Prompts(find_starter_folder(), trainer.vocabulary, configuration.episode.temperature)
    rng = np.random.default_rng(configuration.run.seed)
    mean = trainer._reference.model or trainer._model
    measure(0, trainer._model, mean)
    seconds = 0.0
    for step in range(learner.steps):
        began = time.perf_counter()
        deals = [DEALS[number] for _ in range(-(-learner.groups // len(DEALS))) for number in rng.permutation(len(DEALS))]
        games = play_games(trainer._model, prompts, deals[: learner.groups], learner.group_size, rng)
        batch = build_sequences(games, learner.advantage_estimator, learner.min_group_size, prompts.temperature)
        trainer.train(batch, version=step, progress=step / learner.steps)
        seconds += time.perf_counter() - began
        yield seconds
        measure(step + 1, trainer._model, mean)
