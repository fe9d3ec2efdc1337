"""Confidence intervals of means and shares, by closed forms. Pure.

Means: Student's t (Student, "The probable error of a mean", Biometrika 6, 1908). Shares: E. B. Wilson, "Probable inference, the
law of succession, and statistical inference", JASA 22, 1927. Correlations: R. A. Fisher's z (Biometrika 10, 1915).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from statistics import NormalDist

import msgspec

SHOWN_LEVEL = 0.95
"""Of the intervals that are shown."""


class Interval(msgspec.Struct, frozen=True, kw_only=True):
    """An estimate and its confidence limits, in the unit of the estimate."""

    value: float
    low: float
    high: float


def find_mean_interval(values: Sequence[float], level: float = SHOWN_LEVEL) -> Interval:
    """Of the mean of one value or more; of a single one nothing is known beyond it: both limits are infinite."""
    count = len(values)
    mean = math.fsum(values) / count
    if count < 2:
        return Interval(value=mean, low=-math.inf, high=math.inf)
    variance = math.fsum((each - mean) ** 2 for each in values) / (count - 1)
    reach = find_t_quantile((1 + level) / 2, count - 1) * math.sqrt(variance / count)
    return Interval(value=mean, low=mean - reach, high=mean + reach)


def find_share_interval(part: int, whole: int, level: float = SHOWN_LEVEL) -> Interval:
    """Of ``part`` of ``whole`` independent tries, one try at least."""
    z = NormalDist().inv_cdf((1 + level) / 2)
    share, spread = part / whole, z * z / whole
    centre = (share + spread / 2) / (1 + spread)
    reach = z * math.sqrt(share * (1 - share) / whole + spread / whole / 4) / (1 + spread)
    return Interval(value=share, low=min(share, max(0.0, centre - reach)), high=max(share, min(1.0, centre + reach)))


@lru_cache(maxsize=4096)
def find_t_quantile(probability: float, freedom: int) -> float:
    """The value that Student's t with so many degrees of ``freedom`` stays below with this probability, above one half."""
    low, high = 0.0, 1.0
    while _compute_t_probability(high, freedom) < probability:
        low, high = high, 2 * high
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _compute_t_probability(middle, freedom) < probability else (low, middle)
    return high


def _compute_t_probability(value: float, freedom: int) -> float:
    return 1 - _compute_beta_share(freedom / (freedom + value * value), freedom / 2, 0.5) / 2


def _compute_beta_share(x: float, a: float, b: float) -> float:
    """The regularized incomplete beta function by its continued fraction (DLMF 8.17.22, by Lentz's method)."""
    if x >= 1:
        return 1.0
    if x > (a + 1) / (a + b + 2):
        return 1 - _compute_beta_share(1 - x, b, a)
    front = math.exp(a * math.log(x) + b * math.log1p(-x) + math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b)) / a
    fraction, c, d = 1.0, 1.0, 0.0
    for step in range(300):
        m = step // 2
        if step == 0:
            term = 1.0
        elif step % 2 == 0:
            term = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        else:
            term = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        d = 1 / _keep_from_zero(1 + term * d)
        c = _keep_from_zero(1 + term / c)
        fraction *= c * d
        if abs(1 - c * d) < 1e-12:
            break
    return front * (fraction - 1)


def _keep_from_zero(value: float) -> float:
    return value if abs(value) > 1e-300 else 1e-300
