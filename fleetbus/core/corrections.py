"""Corrections for the difference between the policy that sampled and the policy that trains, and KL estimators. Pure.

Same shapes as `fleetbus.core.objectives`. ``difference`` is ``log pi - log mu`` per token, where mu is the sampler (stale
weights, other kernels) and pi the trainer's policy before the update. A weight multiplies a token's loss and carries no
gradient; a weight of 0 drops the token, which still counts in the denominator of the reduction.
"""

from __future__ import annotations

from collections.abc import Callable

from fleetbus.core.arrays import Array, namespace, stop_gradient


def no_correction(difference: Array, mask: Array, *, low: float, high: float) -> Array:
    """1 everywhere."""
    return namespace(difference).ones_like(difference)


def truncated_token(difference: Array, mask: Array, *, low: float, high: float) -> Array:
    """``min(pi / mu, high)`` per token: truncated importance sampling (TIS)."""
    xp = namespace(difference)
    return xp.clip(xp.exp(stop_gradient(difference)), 0.0, high)


def truncated_sequence(difference: Array, mask: Array, *, low: float, high: float) -> Array:
    """``min(product over the sequence of pi / mu, high)``, the same for all tokens of a sequence."""
    xp = namespace(difference)
    total = xp.sum(stop_gradient(difference) * mask, -1)
    return xp.clip(xp.exp(total), 0.0, high)[:, None] * xp.ones_like(difference)


def masked_token(difference: Array, mask: Array, *, low: float, high: float) -> Array:
    """``pi / mu`` where it is within ``[low, high]``, else 0: masked importance sampling (IcePop, MIS)."""
    xp = namespace(difference)
    ratio = xp.exp(stop_gradient(difference))
    return xp.where((ratio >= low) & (ratio <= high), ratio, xp.zeros_like(ratio))


CORRECTIONS: dict[str, Callable[..., Array]] = {
    "none": no_correction,
    "tis": truncated_token,
    "tis_sequence": truncated_sequence,
    "icepop": masked_token,
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
    return namespace(difference).exp(difference) - difference - 1.0


KL_ESTIMATORS: dict[str, Callable[[Array, Array], Array]] = {"k1": kl_k1, "k2": kl_k2, "k3": kl_k3}
"""KL estimators (Schulman, "Approximating KL divergence", 2020) by the name that a configuration gives."""
