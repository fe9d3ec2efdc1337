"""Advantages against closed forms, for NumPy arrays and torch tensors alike."""

import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fleetbus.core.algorithms.advantages import ADVANTAGES, dr_grpo, grpo, grpo_batch, maxrl, rloo

COMPARED = [name for name in ADVANTAGES if name not in ("reinforce_plus_plus", "gae", "none")]
"""Estimators that compare an episode with its group; see `test_algorithms_added` for the others."""

GROUPWISE = [name for name in ADVANTAGES if name != "grpo_batch"]
"""Estimators that look at nothing but the group."""


@pytest.fixture(params=["numpy", "torch"])
def array(request):
    """Makes a float64 array of the library under test; integers stay integers."""
    return np.array if request.param == "numpy" else torch.tensor


def test_grpo_of_one_success_in_four_is_the_published_closed_form(array):
    rewards, groups = array([1.0, 0.0, 0.0, 0.0]), array([7, 7, 7, 7])

    # mean 1/4, unbiased standard deviation 1/2
    expected = [0.75 / 0.5001, -0.25 / 0.5001, -0.25 / 0.5001, -0.25 / 0.5001]
    np.testing.assert_allclose(np.asarray(grpo(rewards, groups)), expected, rtol=1e-6)


def test_dr_grpo_is_the_difference_to_the_mean(array):
    np.testing.assert_allclose(np.asarray(dr_grpo(array([1.0, 0.0, 0.5, 0.5]), array([0, 0, 0, 0]))), [0.5, -0.5, 0.0, 0.0])


def test_rloo_compares_each_with_the_mean_of_the_others(array):
    rewards = [3.0, 1.0, 2.0]
    expected = [3.0 - 1.5, 1.0 - 2.5, 2.0 - 2.0]

    np.testing.assert_allclose(np.asarray(rloo(array(rewards), array([5, 5, 5]))), expected, atol=1e-12)


def test_maxrl_weighs_a_success_by_how_rare_it_is(array):
    rewards, groups = array([1.0, 0.0, 0.0, 0.0, 1.0, 1.0, 0.0, 0.0]), array([0, 0, 0, 0, 1, 1, 1, 1])

    np.testing.assert_allclose(np.asarray(maxrl(rewards, groups)), [3.0, -1.0, -1.0, -1.0, 1.0, 1.0, -1.0, -1.0])


def test_maxrl_of_a_group_without_success_is_zero(array):
    assert np.asarray(maxrl(array([0.0, 0.0]), array([0, 0]))).tolist() == [0.0, 0.0]


def test_grpo_batch_divides_by_the_deviation_of_the_whole_batch(array):
    rewards, groups = array([1.0, 0.0, 0.6, 0.4]), array([0, 0, 1, 1])

    # the batch's mean is 1/2, its unbiased variance (0.25 + 0.25 + 0.01 + 0.01) / 3
    deviation = np.sqrt(0.52 / 3) + 1e-4
    np.testing.assert_allclose(np.asarray(grpo_batch(rewards, groups)), np.array([0.5, -0.5, 0.1, -0.1]) / deviation, rtol=1e-5)


@pytest.mark.parametrize("name", GROUPWISE)
def test_groups_do_not_touch_each_other(array, name):
    first, second = [1.0, 0.0, 0.0], [0.2, 0.9]
    alone = [np.asarray(ADVANTAGES[name](array(rewards), array([0] * len(rewards)))) for rewards in (first, second)]

    together = np.asarray(ADVANTAGES[name](array([1.0, 0.2, 0.0, 0.9, 0.0]), array([3, 8, 3, 8, 3])))

    np.testing.assert_allclose(together[[0, 2, 4]], alone[0], rtol=1e-12)
    np.testing.assert_allclose(together[[1, 3]], alone[1], rtol=1e-12)


def test_the_memory_of_many_groups_is_no_square():
    episodes, groups = 6_000, 1_500
    rewards, names = np.arange(episodes, dtype=np.float64) % 7, np.arange(episodes) % groups
    tracemalloc.start()
    together = grpo(rewards, names)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()

    alone = grpo(rewards[names == 700], np.zeros(4, np.int64))
    np.testing.assert_allclose(together[names == 700], alone, rtol=1e-12)
    assert peak < 1 << 24


@pytest.mark.parametrize("name", COMPARED)
def test_a_group_of_one_has_advantage_zero(array, name):
    assert np.asarray(ADVANTAGES[name](array([1.0, 1.0, 0.0]), array([0, 1, 1]))).tolist()[0] == 0.0


@pytest.mark.parametrize("name", COMPARED)
def test_a_group_below_the_minimum_has_advantage_zero(array, name):
    rewards, groups = array([1.0, 0.0, 1.0, 0.0, 0.0]), array([0, 0, 1, 1, 1])

    advantages = np.asarray(ADVANTAGES[name](rewards, groups, minimum=3))

    assert advantages[:2].tolist() == [0.0, 0.0]
    assert advantages[2] > 0 > advantages[3]


@pytest.mark.parametrize("name", COMPARED)
@settings(deadline=None)
@given(reward=st.floats(-10, 10), size=st.integers(2, 9))
def test_equal_rewards_give_no_advantage(name, reward, size):
    advantages = ADVANTAGES[name](np.full(size, reward), np.zeros(size, np.int64))

    np.testing.assert_allclose(advantages, 0.0, atol=1e-9)


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo"])
@settings(deadline=None)
@given(rewards=st.lists(st.floats(-5, 5), min_size=2, max_size=8), shift=st.floats(-3, 3))
def test_advantages_ignore_what_all_rewards_share_and_sum_to_zero(name, rewards, shift):
    groups = np.zeros(len(rewards), np.int64)
    advantages = ADVANTAGES[name](np.array(rewards), groups)

    np.testing.assert_allclose(ADVANTAGES[name](np.array(rewards) + shift, groups), advantages, atol=1e-6)
    assert abs(advantages.sum()) < 1e-6
