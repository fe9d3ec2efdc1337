"""Credit per turn: advantages of single turns from rewards of single turns. Pure.

An episode's advantage is the same for all its tokens; here each turn answers for what came after it, and is compared with what
its siblings got from the same turn on. Plain floats: an episode has few turns.
"""

import math
from collections import defaultdict
from collections.abc import Sequence

from fleetbus.core.algorithms.advantages import EPSILON

PAID_WITHIN = 1e-9
"""Sums of the same rewards in another order differ by less than this part of them."""


def unpaid_reward(total: float, turn_rewards: Sequence[float]) -> float:
    """The rest of an episode's ``total`` (its verdict) after what its turns were rewarded; it comes with the last turn.

    Exactly 0 where the verdict is the sum of the turns' rewards; negative where the turns were rewarded more than it.
    """
    paid = math.fsum(turn_rewards)
    return 0.0 if math.isclose(total, paid, rel_tol=PAID_WITHIN, abs_tol=PAID_WITHIN) else total - paid


def compute_turn_returns(turn_rewards: Sequence[float], outcome_reward: float, *, turns: int, discount: float) -> list[float]:
    """The discounted return of each of ``turns`` turns, ``G_k = sum over l >= k of discount^(l - k) r_l``.

    ``outcome_reward`` is what the turns were not rewarded yet (`unpaid_reward`): it comes with the last turn, on top of that
    turn's own reward. Missing turn rewards are 0.
    """
    rewards = [*turn_rewards[:turns], *[0.0] * (turns - len(turn_rewards))]
    following, returns = outcome_reward, []
    for position, reward in enumerate(reversed(rewards)):
        following = reward + (following if position == 0 else discount * following)
        returns.append(following)
    return returns[::-1]


def compute_turn_advantages(
    returns: Sequence[Sequence[float]], groups: Sequence[int], *, minimum: int = 2, normalise: bool = False
) -> list[list[float]]:
    """Each turn's return minus the mean of its group's returns at the same turn.

    ``returns`` has one list per episode, ``groups`` its group. ``normalise`` divides by the unbiased deviation at that turn
    plus 1e-4. A turn that fewer than ``minimum`` episodes of the group reached is compared with the group's returns at the
    last turn that enough of them reached, so that the longest episode is not without credit; 0 where there is no such turn.
    """
    members: defaultdict[int, list[int]] = defaultdict(list)
    for episode, group in enumerate(groups):
        members[group].append(episode)
    advantages: list[list[float]] = [[] for _ in returns]
    for episodes in members.values():
        mean, deviation = 0.0, math.inf
        for turn in range(max(len(returns[episode]) for episode in episodes)):
            reached = [episode for episode in episodes if len(returns[episode]) > turn]
            values = [returns[episode][turn] for episode in reached]
            if len(values) >= max(minimum, 2):
                mean = math.fsum(values) / len(values)
                squares = math.fsum((value - mean) ** 2 for value in values)
                deviation = math.sqrt(squares / (len(values) - 1)) + EPSILON if normalise else 1.0
            for episode, value in zip(reached, values, strict=True):
                advantages[episode].append((value - mean) / deviation)
    return advantages
