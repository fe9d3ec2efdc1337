"""Advantages of episodes from the rewards of their group: how much better each did than its siblings. Pure.

Above is the learner, which gives graded episodes only: an episode without a verdict is no sibling. Every function takes
``rewards`` (floats, shape [N]) and ``groups`` (integers, shape [N], equal within a group) and returns shape [N]. Groups of
fewer than ``minimum`` episodes say nothing about their members and give 0.
"""

from collections.abc import Callable

from fleetbus.core.algorithms.arrays import Array, find_namespace

EPSILON = 1e-4
"""Added to a group's standard deviation, so that equal rewards give 0 instead of noise."""

BLOCK = 64
"""Groups that are summed at once."""


def grpo(rewards: Array, groups: Array, *, minimum: int = 2) -> Array:
    """``(R - mean) / (std + 1e-4)`` with the unbiased standard deviation: group relative policy optimisation
    (DeepSeekMath, arXiv 2402.03300)."""
    xp = find_namespace(rewards)
    centred, size = _centre(rewards, groups, minimum)
    variance = _sum_by_group(centred * centred, groups) / xp.where(size > 1, size - 1, xp.ones_like(size))
    return centred / (xp.sqrt(variance) + EPSILON)


def dr_grpo(rewards: Array, groups: Array, *, minimum: int = 2) -> Array:
    """``R - mean``: without the division that favours questions that are too easy or too hard (Dr. GRPO, arXiv 2503.20783)."""
    return _centre(rewards, groups, minimum)[0]


def rloo(rewards: Array, groups: Array, *, minimum: int = 2) -> Array:
    """``R`` minus the mean of the others, that is ``G / (G - 1) * (R - mean)`` in a group of G: REINFORCE leave-one-out
    (arXiv 2402.14740)."""
    xp = find_namespace(rewards)
    centred, size = _centre(rewards, groups, minimum)
    return centred * size / xp.where(size > 1, size - 1, xp.ones_like(size))


def maxrl(rewards: Array, groups: Array, *, minimum: int = 2) -> Array:
    """``(R - mean) / mean``: weighs a success by how rare it is, towards maximum likelihood of success (MaxRL). 0 where the
    mean is not positive; meant for rewards of 0 and 1."""
    xp = find_namespace(rewards)
    centred, size = _centre(rewards, groups, minimum)
    mean = _sum_by_group(rewards, groups) / size
    return xp.where(mean > 0, centred / xp.where(mean > 0, mean, xp.ones_like(mean)), xp.zeros_like(mean))


def grpo_batch(rewards: Array, groups: Array, *, minimum: int = 2) -> Array:
    """``(R - mean) / (std + 1e-4)`` with the group's mean and the unbiased deviation of all rewards of the batch: a group of
    nearly equal rewards is not blown up (Lite PPO, arXiv 2508.08221). 0 when the batch has one episode."""
    xp = find_namespace(rewards)
    centred, _ = _centre(rewards, groups, minimum)
    ones = xp.ones_like(rewards)
    count = xp.sum(ones)
    difference = rewards - xp.sum(rewards) / count
    variance = xp.sum(difference * difference) / xp.clip(count - 1, 1.0, float("inf"))
    return centred / (xp.sqrt(variance) + EPSILON)


def reinforce_plus_plus(rewards: Array, groups: Array, *, minimum: int = 2) -> Array:
    """``R`` as it is: there is no baseline of a group. The trainer takes the KL out of it token by token and then normalises
    over all tokens of the batch, `normalise_tokens` (REINFORCE++, arXiv 2501.03262)."""
    return rewards


def gae(rewards: Array, groups: Array, *, minimum: int = 2) -> Array:
    """``R`` as it is: the trainer's critic makes advantages of it token by token (`fleetbus.core.algorithms.gae`)."""
    return rewards


def none(rewards: Array, groups: Array, *, minimum: int = 2) -> Array:
    """0 for all: what is learned comes from elsewhere, such as a teacher."""
    return find_namespace(rewards).zeros_like(rewards)


def normalise_tokens(advantages: Array, mask: Array) -> Array:
    """``(A - mean) / (std + 1e-8)`` over the tokens of a batch where ``mask`` is 1, with the deviation of a population; 0
    elsewhere. Both arrays have one shape."""
    xp = find_namespace(advantages)
    count = xp.clip(xp.sum(mask), 1.0, float("inf"))
    centred = (advantages - xp.sum(advantages * mask) / count) * mask
    return centred / (xp.sqrt(xp.sum(centred * centred) / count) + 1e-8)


ADVANTAGES: dict[str, Callable[..., Array]] = {
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "rloo": rloo,
    "maxrl": maxrl,
    "grpo_batch": grpo_batch,
    "reinforce_plus_plus": reinforce_plus_plus,
    "gae": gae,
    "none": none,
}
"""Advantage estimators by the name that a configuration gives."""


def _sum_by_group(values: Array, groups: Array) -> Array:
    """Sums in blocks of groups: a batch of 4,096 episodes with 8 seats each has no matrix of all with all."""
    xp = find_namespace(values)
    zeros, sums = xp.zeros_like(values), xp.zeros_like(values)
    names = xp.unique(groups)
    for start in range(0, len(names), BLOCK):
        block = names[start : start + BLOCK]
        totals = xp.sum(xp.where(block[:, None] == groups[None, :], values[None, :], zeros[None, :]), -1)
        inside = (groups >= block[0]) & (groups <= block[-1])
        sums[inside] = totals[xp.searchsorted(block, groups[inside])]
    return sums


def _centre(rewards: Array, groups: Array, minimum: int) -> tuple[Array, Array]:
    """Rewards minus the mean of their group (0 in groups that are too small), and the size of the group, both [N]."""
    xp = find_namespace(rewards)
    size = _sum_by_group(xp.ones_like(rewards), groups)
    centred = rewards - _sum_by_group(rewards, groups) / size
    return xp.where(size >= max(minimum, 2), centred, xp.zeros_like(centred)), size
