"""Corrections for the difference between the policy that sampled and the policy that trains, and KL estimators. Pure.

Same shapes as `objectives`. ``difference`` is ``log pi - log mu`` per token, where mu is the sampler (stale
weights, other kernels) and pi the trainer's policy before the update. A weight multiplies a token's loss and carries no
gradient; a weight of 0 drops the token, which still counts in the denominator of the reduction.
"""

from collections.abc import Callable

from fleetbus.core.algorithms.arrays import Array, find_namespace, stop_gradient
from fleetbus.core.algorithms.objectives import MAX_LOG_RATIO, limit_log_ratio


def no_correction(difference: Array, mask: Array, *, low: float, high: float) -> Array:
    """1 everywhere."""
    return find_namespace(difference).ones_like(difference)


def truncate_token(difference: Array, mask: Array, *, low: float, high: float) -> Array:
    """``min(pi / mu, high)`` per token: truncated importance sampling (TIS; Ionides 2008, and for engines that differ from
    their trainer Yao et al., "Your efficient RL framework secretly brings you off-policy RL training", 2025)."""
    xp = find_namespace(difference)
    return xp.clip(xp.exp(limit_log_ratio(stop_gradient(difference))), 0.0, high)


def truncate_sequence(difference: Array, mask: Array, *, low: float, high: float) -> Array:
    """``min(product over the sequence of pi / mu, high)``, the same for all tokens of a sequence."""
    xp = find_namespace(difference)
    total = xp.sum(stop_gradient(difference) * mask, -1)
    return xp.clip(xp.exp(limit_log_ratio(total)), 0.0, high)[:, None] * xp.ones_like(difference)


def mask_token(difference: Array, mask: Array, *, low: float, high: float) -> Array:
    """``pi / mu`` where it is within ``[low, high]``, else 0: masked importance sampling (MIS; IcePop in Ring-1T, arXiv
    2510.18855)."""
    xp = find_namespace(difference)
    ratio = xp.exp(limit_log_ratio(stop_gradient(difference)))
    return xp.where((ratio >= low) & (ratio <= high), ratio, xp.zeros_like(ratio))


def plain(difference: Array, mask: Array, *, low: float, high: float) -> Array:
    """``pi / mu`` per token, unbounded: with `ppo_clip` on the ratio to pi it is decoupled PPO as published (AReaL, arXiv
    2505.24298); the bounded weights above and below are what is used of it in practice."""
    return find_namespace(difference).exp(limit_log_ratio(stop_gradient(difference)))


def mask_sequence(difference: Array, mask: Array, *, low: float, high: float) -> Array:
    """The product over the sequence of ``pi / mu`` where it is within ``[low, high]``, else 0 for the whole sequence."""
    xp = find_namespace(difference)
    ratio = xp.exp(limit_log_ratio(xp.sum(stop_gradient(difference) * mask, -1)))
    return xp.where((ratio >= low) & (ratio <= high), ratio, xp.zeros_like(ratio))[:, None] * xp.ones_like(difference)


def geometric_mask(difference: Array, mask: Array, *, low: float, high: float) -> Array:
    """1 for sequences whose geometric mean of ``pi / mu`` is within ``[low, high]``, else 0: length does not matter, so the
    bounds are tight, for example ``[0.99, 1.01]``."""
    xp = find_namespace(difference)
    mean = xp.sum(stop_gradient(difference) * mask, -1) / xp.clip(xp.sum(mask, -1), 1.0, float("inf"))
    ratio = xp.exp(limit_log_ratio(mean))
    keep = xp.where((ratio >= low) & (ratio <= high), xp.ones_like(ratio), xp.zeros_like(ratio))
    return keep[:, None] * xp.ones_like(difference)


CORRECTIONS: dict[str, Callable[..., Array]] = {
    "none": no_correction,
    "tis": truncate_token,
    "tis_sequence": truncate_sequence,
    "icepop": mask_token,
    "mis_sequence": mask_sequence,
    "geometric": geometric_mask,
    "decoupled": plain,
}
"""Corrections by the name that a configuration gives."""


def kl_k1(logprobs: Array, reference: Array) -> Array:
    """``log pi - log ref`` per token: unbiased for KL(pi || ref) under samples of pi, of either sign."""
    return logprobs - reference


def kl_k2(logprobs: Array, reference: Array) -> Array:
    """``(log pi - log ref)^2 / 2``: biased, small variance, and its gradient is that of the KL on policy."""
    difference = logprobs - reference
    return 0.5 * difference * difference


def kl_k3(logprobs: Array, reference: Array) -> Array:
    """``exp(log ref - log pi) - (log ref - log pi) - 1``: unbiased and never negative."""
    difference = reference - logprobs
    limited = find_namespace(difference).clip(difference, -float("inf"), MAX_LOG_RATIO)
    return find_namespace(difference).exp(limited) - limited - 1.0


def kl_penalty(divergence: Array, mask: Array) -> Array:
    """KL in the reward: what a reward of ``-divergence`` on every token adds to its advantage, ``-sum over the sequence's
    tokens from this one on``, undiscounted, less the mean of that over all tokens as a baseline. No gradient.

    A reward counts for all actions before it and none after, which is why the sum begins at the token itself.
    """
    xp = find_namespace(divergence)
    masked = stop_gradient(divergence) * mask
    remaining = xp.sum(masked, -1)[:, None] - xp.cumsum(masked, -1) + masked
    mean = xp.sum(remaining * mask) / xp.clip(xp.sum(mask), 1.0, float("inf"))
    return -(remaining - mean) * mask


KL_ESTIMATORS: dict[str, Callable[[Array, Array], Array]] = {"k1": kl_k1, "k2": kl_k2, "k3": kl_k3}
"""KL estimators (Schulman, "Approximating KL divergence", 2020) by the name that a configuration gives."""
