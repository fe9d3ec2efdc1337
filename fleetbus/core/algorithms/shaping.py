"""Penalty of overlong episodes, and detection of groups without signal (DAPO, arXiv 2503.14476). Pure."""

from collections.abc import Sequence
from typing import Literal

from fleetbus_schemas import Outcome
from fleetbus_schemas.action import FinishReason

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


TruncationMask = Literal["", "outcome", "no_end_token"]
"""Which episodes are left out of the loss and only counted in the mean of their group: none; those with the outcome
``truncated``; those
whose last response has no end token, because the limit of a turn, of the episode or of the model cut it."""


def is_masked(mask: TruncationMask, outcome: Outcome, last: FinishReason) -> bool:
    """True if an episode is left out of the loss; ``last`` is how its last response ended."""
    return (mask == "outcome" and outcome == "truncated") or (mask == "no_end_token" and last != "stop")


def has_zero_variance(rewards: Sequence[float]) -> bool:
    """True if all rewards of a group are equal: every advantage would be zero, and dynamic sampling replaces the group."""
    return not rewards or max(rewards) - min(rewards) <= TOLERANCE
