"""The weight of an episode of several segments in the loss: the closed form of each setting, over random trees."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetbus.core.algorithms.losses import LossPlan, reduce_losses
from fleetbus_workers.learner.base import TrainingSequence
from fleetbus_workers.learner.torch.loss import Totals

LENGTH = 64
leaf_counts = st.lists(st.lists(st.integers(0, 6), min_size=1, max_size=4), min_size=1, max_size=5)
"""Sampled tokens of each leaf of each episode."""


def leaf(episode: int, segment: int, sampled: int) -> TrainingSequence:
    empty = np.zeros(8, np.float32)
    return TrainingSequence(
        episode_id=f"e{episode}",
        group_id="g",
        segment=segment,
        ids=empty.astype(np.int32),
        loss_mask=np.arange(8) < sampled,
        logprobs=empty,
        advantages=empty,
        versions=empty.astype(np.int32),
    )


def reduce(plan: LossPlan, episodes: list[list[int]], losses: list[list[list[float]]]) -> float:
    """As the trainer reduces it: a row per leaf."""
    leaves = [leaf(e, s, count) for e, counts in enumerate(episodes) for s, count in enumerate(counts)]
    totals = Totals.from_sequences(leaves, plan)
    rows, mask = np.zeros((len(leaves), 8)), np.zeros((len(leaves), 8))
    for row, values in enumerate(values for episode in losses for values in episode):
        rows[row, : len(values)], mask[row, : len(values)] = values, 1.0
    shares = np.array(totals.shares)
    return float(reduce_losses(plan, rows, mask, tokens=totals.tokens, sequences=totals.sequences, shares=shares))


def mean(values: list[float]) -> float:
    return sum(values) / max(len(values), 1)


def closed_form(plan: LossPlan, losses: list[list[list[float]]]) -> float:
    everything = [value for episode in losses for values in episode for value in values]
    if plan.reduction == "token_mean" or plan.segment_weight == "token":
        return sum(everything) / max(len(everything), 1)
    if plan.segment_weight == "episode":
        sequences = [[value for values in episode for value in values] for episode in losses]
    else:
        sequences = [values for episode in losses for values in episode]
    if plan.reduction == "sequence_mean":
        return mean([mean(sequence) for sequence in sequences])
    divisor = len(sequences) * (LENGTH if plan.reduction == "constant_mean" else 1)
    return sum(everything) / divisor


@pytest.mark.integration
@pytest.mark.parametrize("weight", ["episode", "token", "segment"])
@pytest.mark.parametrize("reduction", ["token_mean", "sequence_mean", "sequence_sum", "constant_mean"])
@given(episodes=leaf_counts, seed=st.integers(0, 99))
def test_the_loss_of_a_tree_is_its_closed_form(reduction: str, weight: str, episodes: list[list[int]], seed: int) -> None:
    plan = LossPlan(reduction=reduction, segment_weight=weight, loss_scale_factor=LENGTH)  # type: ignore[arg-type]
    draw = np.random.default_rng(seed)
    losses = [[draw.normal(size=count).tolist() for count in counts] for counts in episodes]
    assert reduce(plan, episodes, losses) == pytest.approx(closed_form(plan, losses), abs=1e-12)


@given(tokens=st.integers(4, 8), cuts=st.lists(st.integers(1, 3), max_size=1))
def test_an_episode_weighs_the_same_however_many_leaves_it_has(tokens: int, cuts: list[int]) -> None:
    plan = LossPlan(reduction="sequence_mean")
    values = [float(number) for number in range(tokens)]
    parts = [values[: cuts[0]], values[cuts[0] :]] if cuts else [values]
    other = [[1.0, 2.0]]
    assert reduce(plan, [list(map(len, parts)), [2]], [parts, other]) == pytest.approx((mean(values) + 1.5) / 2)


@pytest.mark.parametrize("reduction", ["token_mean", "sequence_mean", "sequence_sum", "constant_mean"])
def test_episodes_of_one_segment_are_reduced_to_the_same_bits_as_ever(reduction: str) -> None:
    draw = np.random.default_rng(1)
    rows, mask = draw.normal(size=(5, 8)), (draw.random((5, 8)) < 0.5).astype(float)
    plan = LossPlan(reduction=reduction)  # type: ignore[arg-type]
    before = reduce_losses(plan, rows, mask, tokens=mask.sum(), sequences=5)
    assert reduce_losses(plan, rows, mask, tokens=mask.sum(), sequences=5, shares=np.ones(5)) == before
