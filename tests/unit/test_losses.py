"""The whole policy loss out of its parts, against closed forms; NumPy arrays and torch tensors alike."""

import math
from collections.abc import Collection
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from fleetbus.config.check import check_training
from fleetbus.config.fields import tables
from fleetbus.config.settings import AlgorithmSettings, TrainerSettings
from fleetbus.core.algorithms.corrections import CORRECTIONS, KL_ESTIMATORS, geometric_mask, kl_penalty, mask_sequence, plain
from fleetbus.core.algorithms.losses import REDUCTIONS, LossPlan, compute_token_losses, reduce_losses
from fleetbus.core.algorithms.objectives import OBJECTIVES, Clip, dppo_tv, ppo_clip, sequence_sum
from fleetbus.errors import UserError


def drawn(seed: int = 0, rows: int = 4, width: int = 6) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(seed)
    arrays = {name: draw.normal(-1, 0.4, (rows, width)) for name in ("logprobs", "sampler", "proximal", "reference")}
    mask = (draw.random((rows, width)) < 0.7).astype(np.float64)
    mask[:, 0] = 1.0
    return arrays | {"advantages": draw.normal(0, 1, (rows, width)), "mask": mask}


def test_dppo_drops_tokens_whose_probability_moved_too_far_the_wanted_way() -> None:
    probabilities = np.array([[0.5, 0.5, 0.5, 0.05, 0.5]])
    before = np.array([[0.25, 0.35, 0.75, 0.01, 0.75]])
    advantages = np.array([[1.0, 1.0, -1.0, 1.0, 1.0]])

    losses = dppo_tv(np.log(probabilities), np.log(before), advantages, np.ones((1, 5)), Clip(low=0.2, high=0.2))

    # a ratio of 5 stays where the probability moved by 0.04 only
    np.testing.assert_allclose(losses, [[0.0, -0.5 / 0.35, 0.0, -5.0, -0.5 / 0.75]])


def test_dppo_has_the_gradient_of_the_ratio_where_it_keeps_a_token() -> None:
    logprobs = torch.tensor([[math.log(0.4), math.log(0.9)]], dtype=torch.float64, requires_grad=True)
    before = torch.log(torch.tensor([[0.3, 0.3]], dtype=torch.float64))

    dppo_tv(logprobs, before, torch.full_like(before, 2.0), torch.ones_like(before), Clip(low=0.2, high=0.2)).sum().backward()

    assert logprobs.grad is not None
    assert logprobs.grad[0].tolist() == pytest.approx([-2.0 * 0.4 / 0.3, 0.0])


def test_the_sum_over_a_sequence_is_divided_by_the_sequences_only() -> None:
    losses, mask = np.array([[1.0, 2.0, 50.0], [6.0, 60.0, 70.0]]), np.array([[1.0, 1.0, 0.0], [1.0, 0.0, 0.0]])

    assert sequence_sum(losses, mask, sequences=2) == pytest.approx((3.0 + 6.0) / 2)


def test_a_sequence_outside_of_the_band_is_dropped_whole_by_product_or_by_geometric_mean() -> None:
    difference = np.log(np.array([[2.0, 2.0, 9.0], [1.0, 1.1, 1.0]]))
    mask = np.array([[1.0, 1.0, 0.0], [1.0, 1.0, 1.0]])

    product = mask_sequence(difference, mask, low=0.5, high=2.0)
    geometric = geometric_mask(difference, mask, low=0.5, high=1.9)
    loose = geometric_mask(difference, mask, low=0.5, high=2.1)

    np.testing.assert_allclose(product, [[0.0] * 3, [1.1] * 3])  # 4 is outside
    np.testing.assert_allclose(geometric, [[0.0] * 3, [1.0] * 3])  # 2 is outside
    np.testing.assert_allclose(loose, np.ones((2, 3)))


def test_the_geometric_mask_does_not_depend_on_the_length_of_a_sequence() -> None:
    short, long = np.full((1, 2), 0.005), np.full((1, 2000), 0.005)

    for difference in (short, long):
        assert (geometric_mask(difference, np.ones_like(difference), low=0.99, high=1.01) == 1.0).all()
    assert not mask_sequence(long, np.ones_like(long), low=0.5, high=2.0).any()


def test_decoupled_ppo_clips_around_the_proximal_policy_and_weighs_by_its_ratio_to_the_sampler() -> None:
    given = drawn()
    plan = LossPlan(
        rollout_correction="decoupled",
        clip=Clip(low=0.2, high=0.2),
    )

    losses = compute_token_losses(plan, **given)

    ratio = np.exp(given["logprobs"] - given["proximal"])
    weight = np.exp(given["proximal"] - given["sampler"])
    advantages = given["advantages"]
    np.testing.assert_allclose(losses, -weight * np.minimum(ratio * advantages, ratio.clip(0.8, 1.2) * advantages))


def test_without_a_clip_decoupled_ppo_is_importance_sampling_from_the_sampler() -> None:
    given = drawn(1)

    losses = compute_token_losses(
        LossPlan(
            rollout_correction="decoupled",
            clip=Clip(low=1.0, high=1e9),
        ),
        **given,
    )

    np.testing.assert_allclose(losses, -np.exp(given["logprobs"] - given["sampler"]) * given["advantages"])


@pytest.mark.parametrize(("old_policy", "base"), [("auto", "sampler"), ("sampler", "sampler"), ("trainer", "proximal")])
def test_without_a_correction_the_ratio_is_taken_to_the_sampler_unless_told_otherwise(old_policy: str, base: str) -> None:
    given = drawn(2)

    losses = compute_token_losses(
        LossPlan(
            old_policy=old_policy,  # type: ignore[arg-type]
            clip=Clip(low=0.2, high=0.28),
        ),
        **given,
    )  # type: ignore[arg-type]

    expected = ppo_clip(given["logprobs"], given[base], given["advantages"], given["mask"], Clip(low=0.2, high=0.28))
    np.testing.assert_allclose(losses, expected)


def test_a_dropped_token_still_counts_in_the_mean() -> None:
    ones = np.ones((1, 2))
    plan = LossPlan(rollout_correction="icepop", rollout_correction_low=0.5, rollout_correction_high=2.0)

    losses = compute_token_losses(
        plan, logprobs=0 * ones, sampler=np.array([[0.0, 3.0]]), proximal=0 * ones, advantages=ones, mask=ones
    )

    assert reduce_losses(plan, losses, ones, tokens=2, sequences=1) == pytest.approx(-0.5)


@pytest.mark.parametrize("estimator", KL_ESTIMATORS)
def test_the_kl_is_added_to_every_token_and_pulls_to_the_reference_where_there_is_one(estimator: str) -> None:
    given = drawn(3)
    bare = compute_token_losses(LossPlan(), **given)
    plan = LossPlan(kl_coefficient=0.1, kl_estimator=estimator)  # type: ignore[arg-type]

    to_reference = compute_token_losses(plan, **given)
    to_sampler = compute_token_losses(plan, **{**given, "reference": None})

    estimate = KL_ESTIMATORS[estimator]
    np.testing.assert_allclose(to_reference - bare, 0.1 * estimate(given["logprobs"], given["reference"]))
    np.testing.assert_allclose(to_sampler - bare, 0.1 * estimate(given["logprobs"], given["sampler"]))


def test_a_kl_in_the_reward_leaves_the_loss_alone() -> None:
    given = drawn(4)

    np.testing.assert_array_equal(
        compute_token_losses(LossPlan(kl_coefficient=0.1, kl_place="reward"), **given),
        compute_token_losses(LossPlan(), **given),
    )


def test_the_kl_penalty_of_a_token_is_that_of_itself_and_all_tokens_after_it_less_the_mean() -> None:
    divergence = np.array([[1.0, 2.0, 4.0, 99.0], [3.0, 99.0, 99.0, 99.0]])
    mask = np.array([[1.0, 1.0, 1.0, 0.0], [1.0, 0.0, 0.0, 0.0]])

    penalty = kl_penalty(divergence, mask)

    mean = (7 + 6 + 4 + 3) / 4
    np.testing.assert_allclose(penalty, [[mean - 7, mean - 6, mean - 4, 0.0], [mean - 3, 0.0, 0.0, 0.0]])


def test_the_kl_penalty_has_the_gradient_of_the_kl_itself() -> None:
    """Over a categorical policy enumerated whole: the policy gradient of a reward of -k1 is minus that of KL(pi || ref)."""
    logits = torch.tensor([0.3, -0.2, 0.5], dtype=torch.float64, requires_grad=True)
    reference = torch.log_softmax(torch.tensor([0.0, 0.4, -0.1], dtype=torch.float64), -1)
    logprobs = torch.log_softmax(logits, -1)
    (kl_gradient,) = torch.autograd.grad((logprobs.exp() * (logprobs - reference)).sum(), logits, retain_graph=True)

    sampled = logprobs[:, None]
    penalty = kl_penalty(sampled.detach() - reference[:, None], torch.ones_like(sampled))
    (gradient,) = torch.autograd.grad((logprobs.exp().detach() * penalty[:, 0] * logprobs).sum(), logits)

    torch.testing.assert_close(gradient, -kl_gradient)


@pytest.mark.parametrize(
    ("setting", "parts"),
    [
        ("objective", OBJECTIVES),
        ("rollout_correction", CORRECTIONS),
        ("reduction", REDUCTIONS),
        ("kl_estimator", KL_ESTIMATORS),
    ],
)
def test_every_part_of_a_loss_is_one_that_its_setting_takes(setting: str, parts: Collection[str]) -> None:
    assert tables()["algorithm"][setting].choices == tuple(parts)


def test_the_documentation_names_every_objective() -> None:
    page = (Path(__file__).parents[2] / "docs" / "algorithms.md").read_text()
    assert not [name for name in OBJECTIVES if f"`{name}`" not in page]


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("rollout_correction", CORRECTIONS)
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_numpy_and_torch_agree_on_every_combination(objective: str, rollout_correction: str, reduction: str) -> None:
    given = drawn(5)
    plan = LossPlan(
        objective=objective,  # type: ignore[arg-type]
        rollout_correction=rollout_correction,  # type: ignore[arg-type]
        reduction=reduction,  # type: ignore[arg-type]
        clip=Clip(low=0.2, high=0.28, dual=3.0),
        kl_coefficient=0.01,
    )
    tensors = {name: torch.tensor(array) for name, array in given.items()}
    numbers = {"tokens": float(given["mask"].sum()), "sequences": 4.0}

    from_numpy = reduce_losses(plan, compute_token_losses(plan, **given), given["mask"], **numbers)
    from_torch = reduce_losses(plan, compute_token_losses(plan, **tensors), tensors["mask"], **numbers)

    assert from_torch.item() == pytest.approx(float(from_numpy), rel=1e-12)


def test_the_plain_weight_is_the_ratio_itself() -> None:
    np.testing.assert_allclose(plain(np.log([[0.1, 30.0]]), np.ones((1, 2)), low=0.5, high=2.0), [[0.1, 30.0]])


# The KL in the loss


@pytest.mark.parametrize(("estimator", "weighted", "wanted"), [("k3", False, 0.0), ("k3", True, 1.0), ("k1", True, 1.0)])
def test_the_kl_has_its_own_gradient_once_it_is_weighed_by_the_ratio(estimator: Any, weighted: bool, wanted: float) -> None:
    """On policy, over all tokens of a vocabulary: the mean gradient of the estimate beside that of KL(pi || reference). Without
    it k3 has the gradient of the other direction, KL(reference || pi)."""
    logits = torch.tensor([0.5, -1.0, 0.2, 1.5], dtype=torch.float64, requires_grad=True)
    reference = torch.log_softmax(torch.tensor([1.5, 0.1, -0.3, 0.4], dtype=torch.float64), -1)
    logprobs = torch.log_softmax(logits, -1)
    exact = torch.autograd.grad((logprobs.exp() * (logprobs - reference)).sum(), logits, retain_graph=True)[0]
    other = torch.autograd.grad((reference.exp() * (reference - logprobs)).sum(), logits, retain_graph=True)[0]
    plan = LossPlan(kl_coefficient=1.0, kl_estimator=estimator, kl_ratio_weight=weighted)
    one = torch.ones((1, 4), dtype=torch.float64)
    sampler = logprobs.detach()[None]

    losses = compute_token_losses(
        plan,
        logprobs=logprobs[None],
        sampler=sampler,
        proximal=sampler,
        advantages=0.0 * one,
        mask=one,
        reference=reference[None],
    )

    found = torch.autograd.grad((losses[0] * sampler[0].exp()).sum(), logits)[0]
    torch.testing.assert_close(found, exact if wanted else other)


def test_k1_in_the_loss_has_no_gradient_and_is_refused_with_what_to_take() -> None:
    logits = torch.tensor([0.5, -1.0, 0.2], dtype=torch.float64, requires_grad=True)
    logprobs = torch.log_softmax(logits, -1)
    k1 = KL_ESTIMATORS["k1"](logprobs, torch.zeros(3, dtype=torch.float64))
    torch.testing.assert_close(
        torch.autograd.grad((k1 * logprobs.detach().exp()).sum(), logits)[0], torch.zeros(3, dtype=torch.float64)
    )
    plain = AlgorithmSettings(kl_coefficient=0.1, kl_estimator="k1")
    with pytest.raises(UserError, match=r"set k2 or k3, or .*kl_place = reward, or .*kl_ratio_weight = true"):
        check_training(plain, TrainerSettings())
    for accepted in ({"kl_place": "reward"}, {"kl_ratio_weight": True}, {"kl_coefficient": 0.0}):
        check_training(msgspec.structs.replace(plain, **accepted), TrainerSettings())
