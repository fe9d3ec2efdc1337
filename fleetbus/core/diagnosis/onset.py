"""Since which step a quantity has been out of bounds, if it is so now: a one-sided CUSUM and a test of the mean since. Pure.

E. S. Page, "Continuous inspection schemes", Biometrika 41 (1954): sums of (value - reference) grow while the process is out of
control, and the change lies where the sum was last at its minimum. The reference is the smallest effect that is worth a word.
A finding is only what a t-test of the values since confirms: its lower limit is above the reference at a level that is divided
(Bonferroni) by the number of places at which the change could have been, and by the number of quantities that are looked at.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import msgspec

from fleetbus.core.diagnosis.intervals import Interval, find_mean_interval

FALSE_ALARMS = 0.01
"""Probability that a healthy run has any finding, by all tests of it together."""

TESTS = 32
"""The tests of a run among which `FALSE_ALARMS` is divided, those of single workers and tasks aside: these divide further."""

FEWEST_STEPS = 4
"""Steps with a value since the change; less is no finding, however large."""


class Onset(msgspec.Struct, frozen=True, kw_only=True):
    """The first ``step`` of those that are out of bounds, how many have a value, and the mean of these."""

    step: int
    steps: int
    size: Interval


def find_onset(
    values: Mapping[int, float], reference: float, *, tests: int = 1, fewest_steps: int = FEWEST_STEPS
) -> Onset | None:
    """Since when ``values`` (by step, rising; those that are not finite count as not measured) have been above ``reference``;
    None if they are not now, or not for certain. ``tests``: so many quantities like this one are looked at."""
    known = [(step, value) for step, value in values.items() if math.isfinite(value)]
    begin = _find_last_minimum([value - reference for _, value in known])
    since = [value for _, value in known[begin:]]
    if len(since) < fewest_steps:
        return None
    level = 1 - 2 * FALSE_ALARMS / (TESTS * tests * len(known))
    if find_mean_interval(since, level).low <= reference:
        return None
    return Onset(step=known[begin][0], steps=len(since), size=find_mean_interval(since))


def find_begin(values: Mapping[int, float], reference: float) -> int | None:
    """The first of the last steps whose values are together above ``reference``, certain or not; None if there are none."""
    known = [(step, value) for step, value in values.items() if math.isfinite(value)]
    begin = _find_last_minimum([value - reference for _, value in known])
    return known[begin][0] if begin < len(known) else None


def find_growth_onset(values: Mapping[int, float], reference: float, *, tests: int = 1) -> Onset | None:
    """`find_onset` of the logarithm, for positive quantities that change by factors; the size is of the values themselves."""
    logarithms = {step: math.log(value) if value > 0 else math.nan for step, value in values.items()}
    onset = find_onset(logarithms, math.log(reference), tests=tests)
    if onset is None:
        return None
    since = [value for step, value in values.items() if step >= onset.step and math.isfinite(value) and value > 0]
    return Onset(step=onset.step, steps=onset.steps, size=find_mean_interval(since))


def _find_last_minimum(excesses: list[float]) -> int:
    """The number of values up to where their sum is the least: what follows has a positive sum from its beginning on."""
    total, least, place = 0.0, 0.0, 0
    for index, excess in enumerate(excesses, start=1):
        total += excess
        if total <= least:
            least, place = total, index
    return place
