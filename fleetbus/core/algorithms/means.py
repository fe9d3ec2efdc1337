"""Means of any numbers that messages bring: one odd reward must not hide those of all others. Pure.

Numbers that are not finite count nowhere: the learner refuses such rewards, too. A sum may leave the range of floats where its
terms do not; exact fractions, which are slow, are for those alone.
"""

import math
import statistics
from collections.abc import Iterable

SAFE_RANGE = 1e150
"""Squares of differences up to this add up to a float."""


def compute_mean(values: Iterable[float]) -> float | None:
    """The mean of those that are finite; None without any."""
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return None
    try:
        return math.fsum(finite) / len(finite)
    except OverflowError:
        return statistics.mean(finite)


def compute_spread(values: Iterable[float]) -> float | None:
    """The standard deviation, of all and not of a sample, of those that are finite; None without any."""
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return None
    low, high = min(finite), max(finite)
    if low == high:
        return 0.0
    if high - low > SAFE_RANGE:
        return statistics.pstdev(finite)
    mean = compute_mean(finite) or 0.0
    return math.sqrt(math.fsum((value - mean) ** 2 for value in finite) / len(finite))
