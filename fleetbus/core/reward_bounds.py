"""Whether a reward can be trained on: two of 1e308 add up to infinity, and advantages of a whole batch become NaN. Pure."""

import math
from collections.abc import Iterable

MAX_ABS_REWARD = 1e6
"""Default of `environment.max_abs_reward`."""

NOT_FINITE, OUT_OF_BOUNDS = "reward_not_finite", "reward_out_of_bounds"


def find_reward_problem(rewards: Iterable[float], limit: float) -> str:
    """The error class of the first reward that is not a number from ``-limit`` to ``limit``, empty if all are."""
    for reward in rewards:
        if not math.isfinite(reward):
            return NOT_FINITE
        if abs(reward) > limit:
            return OUT_OF_BOUNDS
    return ""
