"""Objectives, corrections and KL estimators against closed forms and against gradients written out by hand."""

import math

import numpy as np
import pytest
import torch

from fleetbus.core.algorithms import corrections, objectives
from fleetbus.core.algorithms.objectives import (
    Clip,
    cispo,
    constant_mean,
    gspo,
    outside_clip,
    ppo_clip,
    sequence_mean,
    token_mean,
)

CLIP = Clip(low=0.2, high=0.28)
DUAL = Clip(low=0.2, high=0.28, dual=3.0)
ONES = np.ones((1, 1))


def one(value):
    return np.array([[float(value)]])


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected"),
    [
        (1.0, 2.0, -2.0),
        (1.2, 1.0, -1.2),  # within the higher clip
        (1.5, 1.0, -1.28),  # gains no more than the clip
        (0.5, 1.0, -0.5),  # may come back from below
        (0.9, -1.0, 0.9),
        (0.5, -1.0, 0.8),
        (1.5, -1.0, 1.5),  # may come back from above
    ],
)
def test_ppo_clip_is_the_pessimistic_of_clipped_and_unclipped(ratio, advantage, expected):
    assert ppo_clip(one(math.log(ratio)), one(0), one(advantage), ONES, CLIP).item() == pytest.approx(expected)


@pytest.mark.parametrize(("ratio", "advantage", "expected"), [(10.0, -1.0, 3.0), (2.0, -1.0, 2.0), (10.0, 1.0, -1.28)])
def test_dual_clip_bounds_only_the_loss_of_negative_advantages(ratio, advantage, expected):
    assert ppo_clip(one(math.log(ratio)), one(0), one(advantage), ONES, DUAL).item() == pytest.approx(expected)


def test_outside_clip_is_exactly_where_ppo_clip_gives_no_gradient():
    draw = np.random.default_rng(0)
    logprobs = torch.tensor(draw.normal(0, 0.4, (20, 30)), requires_grad=True)
    advantages = torch.tensor(draw.normal(0, 1, (20, 30)))
    old = torch.zeros_like(logprobs)

    ppo_clip(logprobs, old, advantages, torch.ones_like(old), CLIP).sum().backward()

    outside = outside_clip(logprobs.detach().exp(), advantages, CLIP)
    assert torch.equal(logprobs.grad == 0, outside)  # type: ignore[arg-type]
    assert 0 < outside.sum() < outside.numel()


def test_on_policy_every_objective_has_the_policy_gradient():
    draw = np.random.default_rng(1)
    advantages = torch.tensor(draw.normal(0, 1, (3, 5)))
    mask = torch.tensor([[1.0] * 5, [1.0] * 3 + [0.0] * 2, [1.0] * 5], dtype=torch.float64)
    for name, objective in objectives.OBJECTIVES.items():
        logprobs = torch.tensor(draw.normal(-1, 0.5, (3, 5)), requires_grad=True)

        (objective(logprobs, logprobs.detach(), advantages, mask, CLIP) * mask).sum().backward()

        torch.testing.assert_close(logprobs.grad, -advantages * mask, msg=name)


def test_gspo_takes_the_geometric_mean_over_the_sequence_and_spreads_its_gradient():
    logprobs = torch.tensor([[0.1, 0.05, 9.0], [0.6, 0.6, 0.6]], dtype=torch.float64, requires_grad=True)
    mask = torch.tensor([[1.0, 1.0, 0.0], [1.0, 1.0, 1.0]], dtype=torch.float64)
    ones = torch.ones_like(mask)

    losses = gspo(logprobs, torch.zeros_like(mask), ones, mask, CLIP)
    (losses * mask).sum().backward()

    ratio = math.exp(0.15 / 2)
    assert losses[0, 0].item() == pytest.approx(-ratio)
    assert losses[1].tolist() == pytest.approx([-1.28] * 3)
    assert logprobs.grad[0].tolist() == pytest.approx([-ratio, -ratio, 0.0])
    assert logprobs.grad[1].tolist() == [0.0, 0.0, 0.0]


def test_cispo_clips_the_weight_and_keeps_the_gradient_of_clipped_tokens():
    logprobs = torch.tensor([[math.log(2.0), math.log(0.5), 0.0]], dtype=torch.float64, requires_grad=True)
    advantages = torch.tensor([[1.0, -1.0, 3.0]], dtype=torch.float64)

    cispo(logprobs, torch.zeros_like(advantages), advantages, torch.ones_like(advantages), CLIP).sum().backward()

    assert logprobs.grad[0].tolist() == pytest.approx([-1.28, 0.8, -3.0])


LOSSES = np.array([[1.0, 2.0, 50.0], [6.0, 60.0, 70.0]])
MASK = np.array([[1.0, 1.0, 0.0], [1.0, 0.0, 0.0]])


def test_reductions_weigh_tokens_or_sequences_as_they_say_and_ignore_masked_places():
    assert token_mean(LOSSES, MASK, tokens=3).item() == pytest.approx(9 / 3)
    assert sequence_mean(LOSSES, MASK, sequences=2).item() == pytest.approx((1.5 + 6.0) / 2)
    assert constant_mean(LOSSES, MASK, sequences=2, length=10).item() == pytest.approx(9 / 20)


def test_reductions_of_parts_add_up_to_the_reduction_of_the_whole():
    parts = [(LOSSES[:1], MASK[:1]), (LOSSES[1:], MASK[1:])]

    assert sum(token_mean(*part, tokens=3) for part in parts) == pytest.approx(token_mean(LOSSES, MASK, tokens=3))
    assert sum(sequence_mean(*part, sequences=2) for part in parts) == pytest.approx(sequence_mean(LOSSES, MASK, sequences=2))


def test_a_sequence_without_sampled_tokens_adds_nothing():
    assert sequence_mean(np.array([[3.0]]), np.array([[0.0]]), sequences=1).item() == 0.0


RATIOS = np.array([[0.4, 1.0, 3.0], [0.5, 1.5, 2.0]])
BOUNDS = {"low": 0.5, "high": 2.0}


def test_truncated_importance_sampling_bounds_the_weight_from_above_only():
    weights = corrections.truncate_token(np.log(RATIOS), np.ones((2, 3)), **BOUNDS)

    np.testing.assert_allclose(weights, [[0.4, 1.0, 2.0], [0.5, 1.5, 2.0]])


def test_truncated_sequence_sampling_weighs_all_tokens_by_the_product():
    mask = np.array([[1.0, 1.0, 1.0], [1.0, 1.0, 0.0]])

    weights = corrections.truncate_sequence(np.log(RATIOS), mask, **BOUNDS)

    np.testing.assert_allclose(weights, [[1.2] * 3, [0.75] * 3])


def test_icepop_drops_tokens_outside_of_its_band():
    weights = corrections.mask_token(np.log(RATIOS), np.ones((2, 3)), low=0.45, high=1.9)

    np.testing.assert_allclose(weights, [[0.0, 1.0, 0.0], [0.5, 1.5, 0.0]])


@pytest.mark.parametrize("name", corrections.CORRECTIONS)
def test_equal_policies_need_no_correction_and_weights_carry_no_gradient(name):
    difference = torch.zeros((2, 3), dtype=torch.float64, requires_grad=True)

    weights = corrections.CORRECTIONS[name](difference, torch.ones_like(difference), **BOUNDS)

    assert torch.equal(weights, torch.ones_like(weights))
    assert not weights.requires_grad


def test_kl_estimators_have_their_closed_forms():
    logprobs, reference = np.log([[0.5]]), np.log([[0.25]])

    assert corrections.kl_k1(logprobs, reference).item() == pytest.approx(math.log(2))
    assert corrections.kl_k2(logprobs, reference).item() == pytest.approx(math.log(2) ** 2 / 2)
    assert corrections.kl_k3(logprobs, reference).item() == pytest.approx(0.5 + math.log(2) - 1)


def test_k1_and_k3_are_unbiased_and_k3_is_never_negative():
    policy, reference = np.array([0.7, 0.2, 0.1]), np.array([0.3, 0.3, 0.4])
    divergence = (policy * np.log(policy / reference)).sum()

    for name in ("k1", "k3"):
        per_token = corrections.KL_ESTIMATORS[name](np.log(policy), np.log(reference))
        assert (policy * per_token).sum() == pytest.approx(divergence)
    assert (corrections.kl_k3(np.log(policy), np.log(reference)) >= 0).all()


@pytest.mark.parametrize("name", objectives.OBJECTIVES)
def test_numpy_and_torch_agree(name):
    draw = np.random.default_rng(2)
    arrays = [draw.normal(0, 0.3, (4, 6)) for _ in range(3)]
    mask = (draw.random((4, 6)) < 0.7).astype(np.float64)

    from_numpy = objectives.OBJECTIVES[name](*arrays, mask, DUAL)  # type: ignore[arg-type, call-arg]
    from_torch = objectives.OBJECTIVES[name](*map(torch.tensor, arrays), torch.tensor(mask), DUAL)  # type: ignore[arg-type, call-arg]

    np.testing.assert_allclose(from_torch.numpy(), from_numpy, rtol=1e-12)
