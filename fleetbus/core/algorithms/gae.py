"""Generalized advantage estimation (arXiv 1506.02438) over the sampled tokens of a sequence, and the critic's loss. Pure.

Within a turn tokens are not discounted; from a turn to the next, where the environment answered, they are by the discount per
turn. What an episode or its turns were rewarded comes with the last token of each turn.
"""

import numpy as np
from numpy.typing import NDArray

from fleetbus.core.algorithms.arrays import Array, find_namespace

Floats = NDArray[np.float64]


def find_turn_ends(mask: NDArray[np.bool_], returns: NDArray[np.floating]) -> NDArray[np.bool_]:
    """Of the N sampled tokens of a sequence (True in ``mask`` [T]), those that end a turn: the environment's tokens follow, or
    a token with another return (``returns`` [N])."""
    places = np.nonzero(mask)[0]
    ends = np.ones(len(places), bool)
    ends[:-1] = (np.diff(places) > 1) | (returns[1:] != returns[:-1])
    return ends


def compute_gae(
    returns: NDArray[np.floating], values: NDArray[np.floating], ends: NDArray[np.bool_], *, discount: float, decay: float
) -> tuple[Floats, Floats]:
    """Advantages and the critic's targets, both [N], of N sampled tokens.

    ``returns`` is at each token what its turn and those after it are rewarded, discounted by ``discount`` per turn; ``values``
    what the critic expected before the token; ``ends`` from `find_turn_ends`; ``decay`` is lambda. With lambda 1 an advantage
    is ``return - value``, with 0 the one-step error ``reward + discount * next value - value``.
    """
    wanted, expected = np.asarray(returns, np.float64), np.asarray(values, np.float64)
    factors = np.where(ends, discount, 1.0)
    after = np.append(wanted[1:], 0.0)
    following = np.append(expected[1:], 0.0)
    rewards = np.where(ends, wanted - factors * after, 0.0)
    errors = rewards + factors * following - expected
    advantages = np.zeros_like(errors)
    carried = 0.0
    for place in range(len(errors) - 1, -1, -1):
        carried = advantages[place] = errors[place] + factors[place] * decay * carried
    return advantages, advantages + expected


def clip_values(values: Array, old: Array, targets: Array, clip: float) -> Array:
    """The critic's loss of each token, ``0.5 * max((V - R)^2, (clip(V, V_old +- clip) - R)^2)``; ``clip`` 0: ``0.5 * (V -
    R)^2`` (PPO's value clipping, as in OpenAI's baselines)."""
    plain = (values - targets) ** 2
    if not clip:
        return 0.5 * plain
    xp = find_namespace(values)
    bounded = old + xp.clip(values - old, -clip, clip)
    return 0.5 * xp.maximum(plain, (bounded - targets) ** 2)


def explain_variance(values: Floats, targets: Floats) -> float:
    """``1 - Var(R - V) / Var(R)``: 1 for a critic that foresees every return, 0 for one that says the mean, NaN where all
    returns are equal."""
    variance = float(np.var(targets))
    return 1.0 - float(np.var(targets - values)) / variance if variance > 0.0 else float("nan")
