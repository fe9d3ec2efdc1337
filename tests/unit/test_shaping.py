"""Overlong episodes, groups that say nothing, and credit per turn, against closed forms."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleetbus.core.algorithms.advantages import dr_grpo, grpo
from fleetbus.core.algorithms.shaping import has_zero_variance, overlong_penalty
from fleetbus.core.algorithms.turn_credit import compute_turn_advantages, compute_turn_returns

np = pytest.importorskip("numpy")


@pytest.mark.parametrize(("length", "penalty"), [(0, 0.0), (80, 0.0), (85, -0.25), (90, -0.5), (100, -1.0), (150, -1.0)])
def test_the_soft_punishment_grows_linearly_over_the_buffer_and_no_further(length: int, penalty: float) -> None:
    assert overlong_penalty(length, limit=100, buffer=20) == pytest.approx(penalty)
    assert overlong_penalty(length, limit=100, buffer=20, factor=0.5) == pytest.approx(penalty / 2)


def test_without_a_buffer_nothing_is_punished() -> None:
    assert overlong_penalty(1000, limit=100, buffer=0) == 0.0


def test_a_group_says_nothing_when_all_its_rewards_are_equal() -> None:
    assert has_zero_variance([0.3, 0.3 + 1e-9])
    assert has_zero_variance([])
    assert not has_zero_variance([0.0, 1.0])


def test_returns_are_discounted_per_turn_and_the_outcome_comes_with_the_last_turn() -> None:
    assert compute_turn_returns([1.0, 0.0, 2.0], 1.0, turns=3, discount=0.5) == pytest.approx(
        [1 + 0.5 * 0 + 0.25 * 3, 1.5, 3.0]
    )
    assert compute_turn_returns([], 4.0, turns=2, discount=1.0) == [4.0, 4.0]
    assert compute_turn_returns([1.0], 0.0, turns=3, discount=1.0) == [1.0, 0.0, 0.0]


@settings(deadline=None)
@given(st.lists(st.floats(-2, 2), min_size=2, max_size=6), st.integers(1, 4))
def test_without_rewards_of_turns_every_turn_has_the_advantage_of_the_episode(rewards: list[float], turns: int) -> None:
    returns = [compute_turn_returns([], reward, turns=turns, discount=1.0) for reward in rewards]
    groups = np.zeros(len(rewards), np.int64)

    plain = compute_turn_advantages(returns, groups.tolist())
    normalised = compute_turn_advantages(returns, groups.tolist(), normalise=True)

    for episode, values in enumerate(dr_grpo(np.array(rewards), groups)):
        assert plain[episode] == pytest.approx([values] * turns, abs=1e-9)
    for episode, values in enumerate(grpo(np.array(rewards), groups)):
        assert normalised[episode] == pytest.approx([values] * turns, rel=1e-6, abs=1e-6)


def test_a_turn_answers_for_what_came_after_it_only() -> None:
    """Both got 1 in total, one at once and one at the end: the second turn of the second was the better one."""
    returns = [compute_turn_returns(rewards, 0.0, turns=2, discount=1.0) for rewards in ([1.0, 0.0], [0.0, 1.0])]

    assert compute_turn_advantages(returns, [0, 0]) == [[0.0, -0.5], [0.0, 0.5]]


def test_groups_are_not_compared_with_each_other() -> None:
    assert compute_turn_advantages([[1.0], [9.0], [3.0], [11.0]], [0, 1, 0, 1]) == [[-1.0], [-1.0], [1.0], [1.0]]


def test_a_turn_that_only_one_reached_is_compared_with_the_last_turn_that_enough_reached() -> None:
    advantages = compute_turn_advantages([[1.0, 4.0, 6.0], [3.0, 2.0], [2.0]], [0, 0, 0])

    assert advantages[0] == pytest.approx([-1.0, 1.0, 3.0])


def test_a_lonely_episode_has_no_advantage() -> None:
    assert compute_turn_advantages([[1.0, 5.0]], [0]) == [[0.0, 0.0]]
    assert compute_turn_advantages([[1.0], [2.0]], [0, 0], minimum=3) == [[0.0], [0.0]]


def test_the_deviation_is_unbiased() -> None:
    (low,), (high,) = compute_turn_advantages([[0.0], [1.0]], [0, 0], normalise=True)

    assert high == -low == pytest.approx(0.5 / (math.sqrt(0.5) + 1e-4))
