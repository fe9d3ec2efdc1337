"""Leaves that share prefixes, in the torch trainer: the gradient is that of each sampled token once, after what it was sampled
after, however the leaves are cut into micro-batches, packed, or run upon one prefix."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from fleetbus.core.episode.history import Turn
from fleetbus.core.episode.segments import collect_segment_ids, fold_segments
from fleetbus_schemas import NEW_ROOT, Action, EpisodeFinished, SegmentOrigin, VersionSpan
from fleetbus_schemas.tokens import count_tokens, pack_ids, pack_logprobs, pack_mask
from fleetbus_workers.learner.base import TrainingSequence
from fleetbus_workers.learner.batches import CreditPlan, build_sequence
from fleetbus_workers.learner.leaves import list_leaves, split_sequence
from fleetbus_workers.learner.torch.trainer import TorchTrainer
from tests.support.trainable_model import VOCABULARY, compute_distance, compute_gradient, compute_logprobs
from tests.support.trainer_settings import trainer_settings

PROMPT = list(range(3, 27))
ORIGINS: tuple[tuple[int, SegmentOrigin | None], ...] = (
    (0, None),
    (0, None),
    (1, SegmentOrigin(parent=0, kept=24, reason="context_dropped", repeated=5)),
    (2, SegmentOrigin(parent=1, kept=30, reason="reasoning_dropped")),
    (0, None),
    (3, SegmentOrigin(parent=NEW_ROOT, kept=0, reason="sub_agent")),
    (4, SegmentOrigin(parent=3, kept=29, reason="history_edited")),
    (4, None),
)
"""The segment of each turn: turns dropped, a cut in mid-answer, the first gone on with, a new prompt, one kept whole."""


def play(model: Any, seed: int) -> list[Turn]:
    """An episode with random messages and answers; each sampled token has the model's log-probability where it was sampled."""
    draw = np.random.default_rng(seed)
    turns: list[Turn] = []
    for number, (segment, origin) in enumerate(ORIGINS):
        segments = fold_segments(turns)
        repeated: list[int] = []
        if origin is not None and origin.repeated:
            repeated = collect_segment_ids(segments[origin.parent], turns)[-origin.repeated :]
        is_root = not turns or (origin is not None and origin.parent == NEW_ROOT)
        shown = PROMPT if is_root else draw.integers(3, VOCABULARY, 6).tolist()
        sampled = draw.integers(3, VOCABULARY, 5).tolist()
        action = Action(
            episode_id=f"e{seed}",
            attempt=1,
            turn=number,
            text="",
            prompt_delta=pack_ids([*repeated, *shown]),
            sampled=pack_ids(sampled),
            versions=(VersionSpan(version=3, start=0, stop=5),),
            segment=segment,
            origin=origin,
        )
        turns.append(Turn(sequence=number, lane="e1", action=action))
        logprobs = compute_logprobs(model, np.array(read_context(turns, number)))[-5:].tolist()
        turns[-1] = msgspec.structs.replace(turns[-1], action=msgspec.structs.replace(action, logprobs=pack_logprobs(logprobs)))
    return turns


def read_context(turns: list[Turn], number: int) -> list[int]:
    """The ids of a turn's segment up to the end of that turn."""
    played = turns[: number + 1]
    return collect_segment_ids(fold_segments(played)[played[-1].action.segment], played)


def build_leaves(turns: list[Turn], advantages: list[float]) -> list[TrainingSequence]:
    actions = [turn.action for turn in turns]
    mask = [own for one in actions for own in [False] * count_tokens(one.prompt_delta) + [True] * count_tokens(one.sampled)]
    result = EpisodeFinished(
        episode_id=actions[0].episode_id,
        group_id="g",
        attempt=1,
        outcome="completed",
        worker="w",
        tokens=len(mask),
        loss_mask=pack_mask(mask),
    )
    return split_sequence(build_sequence(result, actions, advantages, CreditPlan(), 1.0), list_leaves(actions))


@pytest.mark.parametrize(
    "choice",
    [
        {},
        {"share_prefix": False},
        {"micro_batch_size": 1},
        {"micro_batch_size": 64},
        {"packing": True, "token_budget": 200},
    ],
    ids=str,
)
def test_the_gradient_is_that_of_each_sampled_token_once_where_it_was_sampled(folder: Path, choice: dict[str, Any]) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    episodes = [play(model, seed) for seed in range(3)]
    draw = np.random.default_rng(9)
    advantages = [draw.normal(size=len(ORIGINS)).tolist() for _ in episodes]
    batch = [leaf for turns, by_turn in zip(episodes, advantages, strict=True) for leaf in build_leaves(turns, by_turn)]
    assert len(batch) == 3 * 4, "segment 3 is kept whole by segment 4, and no leaf"
    tokens = len(episodes) * len(ORIGINS) * 5
    for turns, by_turn in zip(episodes, advantages, strict=True):
        for turn, advantage in zip(turns, by_turn, strict=True):
            ids = torch.tensor(read_context(turns, turn.action.turn))
            logprobs = torch.log_softmax(model(ids[None]).logits[0, :-1], -1).gather(-1, ids[1:, None])[-5:, 0]
            (-advantage * logprobs.sum() / tokens).backward()
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}

    trainer = TorchTrainer(folder, settings=trainer_settings(**{"max_grad_norm": 1e9, "micro_batch_size": 4, **choice}))

    assert compute_distance(compute_gradient(trainer, batch), expected) <= 1e-5
    metrics = trainer.train(batch, version=3, progress=0.0)
    assert metrics["tokens"] == tokens
    assert metrics["logprob_difference_max"] < 1e-4
