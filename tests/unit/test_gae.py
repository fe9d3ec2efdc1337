"""Generalized advantages over turns and tokens, beside what they are by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetbus.core.algorithms.gae import clip_values, compute_gae, explain_variance, find_turn_ends

MASK = np.array([0, 0, 1, 1, 0, 0, 1, 1, 1], bool)
VALUES = np.array([0.5, 0.25, -1.0, 2.0, 0.75])


def test_turns_end_where_the_environment_speaks_or_the_return_changes() -> None:
    assert find_turn_ends(MASK, np.ones(5)).tolist() == [False, True, False, False, True]
    assert find_turn_ends(np.ones(4, bool), np.array([3.0, 3.0, 1.0, 1.0])).tolist() == [False, True, False, True]
    assert find_turn_ends(np.zeros(3, bool), np.ones(0)).tolist() == []


def test_with_lambda_1_an_advantage_is_the_return_less_the_value() -> None:
    returns = np.array([1.8, 1.8, 2.0, 2.0, 2.0])  # rewarded 0.0 after turn 0 (0.9 * 2.0), and 2.0 after turn 1
    advantages, targets = compute_gae(returns, VALUES, find_turn_ends(MASK, returns), discount=0.9, decay=1.0)
    np.testing.assert_allclose(advantages, returns - VALUES, atol=1e-12)
    np.testing.assert_allclose(targets, returns, atol=1e-12)


def test_with_lambda_0_an_advantage_is_the_error_of_one_step() -> None:
    returns = np.array([2.8, 2.8, 2.0, 2.0, 2.0])  # 1.0 after turn 0, 2.0 after turn 1
    advantages, _ = compute_gae(returns, VALUES, find_turn_ends(MASK, returns), discount=0.9, decay=0.0)
    by_hand = [0.25 - 0.5, 1.0 + 0.9 * -1.0 - 0.25, 2.0 - -1.0, 0.75 - 2.0, 2.0 - 0.75]
    np.testing.assert_allclose(advantages, by_hand, atol=1e-12)


def test_in_between_errors_are_summed_with_the_products_of_discount_and_lambda() -> None:
    returns = np.array([2.8, 2.8, 2.0, 2.0, 2.0])
    advantages, targets = compute_gae(returns, VALUES, find_turn_ends(MASK, returns), discount=0.9, decay=0.95)
    errors = np.array([0.25 - 0.5, 1.0 + 0.9 * -1.0 - 0.25, 2.0 - -1.0, 0.75 - 2.0, 2.0 - 0.75])
    factors = [0.95, 0.9 * 0.95, 0.95, 0.95]
    by_hand = [sum(math.prod(factors[start:place]) * errors[place] for place in range(start, 5)) for start in range(5)]
    np.testing.assert_allclose(advantages, by_hand, atol=1e-12)
    np.testing.assert_allclose(targets, np.array(by_hand) + VALUES, atol=1e-12)


@given(
    st.lists(st.tuples(st.integers(1, 4), st.floats(-2, 2)), min_size=1, max_size=5),
    st.floats(0.1, 1.0),
    st.integers(0, 2**31),
)
def test_a_critic_that_foresees_everything_leaves_no_advantage(
    turns: list[tuple[int, float]], discount: float, seed: int
) -> None:
    returns, following = [], 0.0
    for tokens, reward in reversed(turns):
        following = reward + discount * following
        returns[:0] = [following] * tokens
    ends = np.zeros(len(returns), np.bool_)
    ends[np.cumsum([tokens for tokens, _ in turns]) - 1] = True
    decay = float(np.random.default_rng(seed).random())
    advantages, _ = compute_gae(np.array(returns), np.array(returns), ends, discount=discount, decay=decay)
    np.testing.assert_allclose(advantages, 0.0, atol=1e-9)


def test_a_value_that_moved_beyond_the_clip_gains_nothing_by_it() -> None:
    values, old, targets = np.array([1.0, 1.0, 0.1]), np.array([0.0, 0.0, 0.0]), np.array([1.0, -1.0, 1.0])
    np.testing.assert_allclose(clip_values(values, old, targets, 0.2), [0.5 * 0.8**2, 0.5 * 4.0, 0.5 * 0.9**2])
    np.testing.assert_allclose(clip_values(values, old, targets, 0.0), [0.0, 2.0, 0.5 * 0.9**2])


def test_variance_is_explained_by_values_that_follow_the_returns() -> None:
    wanted = np.array([0.0, 1.0, 2.0, 3.0])
    assert explain_variance(wanted + 5.0, wanted) == pytest.approx(1.0)
    assert explain_variance(np.full(4, 9.0), wanted) == pytest.approx(0.0)
    assert math.isnan(explain_variance(wanted, np.ones(4)))
