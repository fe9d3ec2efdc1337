"""Intervals against published values, onsets against where they were put, and no alarm where nothing changes."""

from __future__ import annotations

import math
import random

import pytest

from fleetbus.core.diagnosis.intervals import find_mean_interval, find_share_interval, find_t_quantile
from fleetbus.core.diagnosis.onset import find_growth_onset, find_onset


@pytest.mark.parametrize(
    ("probability", "freedom", "value"),
    [(0.975, 1, 12.7062), (0.975, 4, 2.7764), (0.975, 30, 2.0423), (0.9995, 3, 12.924), (0.99999, 4, 23.332)],
)
def test_quantiles_are_those_of_the_tables(probability: float, freedom: int, value: float) -> None:
    assert find_t_quantile(probability, freedom) == pytest.approx(value, rel=1e-4)


def test_a_mean_has_students_interval_and_a_single_value_none() -> None:
    found = find_mean_interval([1.0, 2.0, 3.0, 4.0])
    assert (found.value, found.low, found.high) == pytest.approx((2.5, 0.4457, 4.5543), abs=1e-4)
    alone = find_mean_interval([2.0])
    assert (alone.value, alone.low, alone.high) == (2.0, -math.inf, math.inf)


def test_a_share_has_wilsons_interval_which_stays_within_0_and_1() -> None:
    found = find_share_interval(8, 10)
    assert (found.low, found.high) == pytest.approx((0.4902, 0.9433), abs=1e-4)
    assert find_share_interval(0, 10).low == 0.0
    assert find_share_interval(10, 10).high == 1.0


@pytest.mark.parametrize("begin", [1, 5, 12, 14])
def test_an_onset_is_where_the_values_rise_for_good(begin: int) -> None:
    chance = random.Random(begin)
    values = {step: chance.gauss(1.0 if step >= begin else 0.0, 0.1) for step in range(1, 25)}
    found = find_onset(values, 0.5)
    assert found is not None
    assert (found.step, found.steps) == (begin, 25 - begin)
    assert found.size.value == pytest.approx(1.0, abs=0.1)


def test_steps_that_were_not_measured_are_left_out() -> None:
    values = {step: (1.0 + 0.01 * step if step >= 11 else 0.0) if step % 2 else math.nan for step in range(1, 25)}
    found = find_onset(values, 0.5)
    assert found is not None
    assert (found.step, found.steps) == (11, 7)


def test_what_has_ended_or_has_only_begun_is_no_onset() -> None:
    assert find_onset({step: float(5 <= step < 15) for step in range(1, 31)}, 0.5) is None
    assert find_onset({step: float(step >= 22) for step in range(1, 25)}, 0.5) is None
    assert find_onset({}, 0.5) is None


def test_what_changes_by_factors_is_found_although_it_is_far_from_even() -> None:
    values = {step: 3e-8 if step < 9 else 3e-3 * (step - 8) for step in range(1, 19)}
    assert find_onset(values, 1e-3) is None
    found = find_growth_onset(values, 1e-3)
    assert found is not None
    assert (found.step, found.size.value) == (9, pytest.approx(0.0165))


def test_a_thousand_runs_of_noise_below_the_reference_raise_no_alarm() -> None:
    chance = random.Random(7)
    noises = ([chance.gauss(0.0, 1.0) for _ in range(40)] for _ in range(1000))
    assert [noise for noise in noises if find_onset(dict(enumerate(noise)), 0.0) is not None] == []
