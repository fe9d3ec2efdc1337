"""Penalty of overlong episodes, and detection of groups without signal (DAPO, arXiv 2503.14476). Pure."""

from __future__ import annotations

from collections.abc import Sequence

TOLERANCE = 1e-6
"""Rewards that differ by less are equal."""


def overlong_penalty(length: int, *, limit: int, buffer: int, factor: float = 1.0) -> float:
    """The soft overlong penalty, to be added to the reward; all lengths in tokens.

    0 up to ``limit - buffer``, then ``-factor * (length - (limit - buffer)) / buffer``, never below ``-factor``.
    """
    if buffer <= 0:
        return 0.0
    exceeding = length - (limit - buffer)
    return -factor * min(max(exceeding / buffer, 0.0), 1.0)


def has_zero_variance(rewards: Sequence[float]) -> bool:
    """True if all rewards of a group are equal: every advantage would be zero, and dynamic sampling replaces the group."""
    return not rewards or max(rewards) - min(rewards) <= TOLERANCE
