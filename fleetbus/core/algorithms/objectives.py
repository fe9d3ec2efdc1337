"""Policy-gradient objectives: a loss per sampled token, and how losses become one number. Pure.

Above is a trainer. Arrays are NumPy's or torch's, shape [B, T]: B sequences, T places for sampled tokens, ``mask`` 1.0 where
there is one. ``logprobs`` are the current policy's and carry the gradient, ``old_logprobs`` the ones that the ratio is taken to
(the sampler's, or the trainer's before the update), ``advantages`` have one value per token. Losses are to be minimised;
values at masked-out places are finite as long as the inputs are, and the reductions ignore them.
"""

from collections.abc import Callable

import msgspec

from fleetbus.core.algorithms.arrays import Array, find_namespace, stop_gradient

MAX_LOG_RATIO = 20.0
"""Ratios between 2e-9 and 5e8 are enough for any clip; above e^88 float32 has none, and one token made the whole step NaN."""


class Clip(msgspec.Struct, frozen=True, kw_only=True):
    """The range that an objective follows: ratios between ``1 - low`` and ``1 + high``. ``high`` above ``low`` is clip-higher
    (DAPO, arXiv 2503.14476). ``dual``, above 1, is the bound of dual clip (arXiv 1912.09729)."""

    low: float
    high: float
    dual: float | None = None


def ppo_clip(logprobs: Array, old_logprobs: Array, advantages: Array, mask: Array, clip: Clip) -> Array:
    """``-min(r A, clip(r, 1 - low, 1 + high) A)`` with ``r = pi / pi_old`` per token (PPO, arXiv 1707.06347).

    With ``dual`` the loss of tokens with negative advantage is at most ``-dual A``.
    """
    return _clip_ratio(token_ratio(logprobs, old_logprobs), advantages, clip)


def gspo(logprobs: Array, old_logprobs: Array, advantages: Array, mask: Array, clip: Clip) -> Array:
    """`ppo_clip` with the sequence's ratio, ``s = exp(mean over its tokens of log(pi / pi_old))``, in place of the token's; the
    gradient reaches each token through ``sg(s) pi / sg(pi)`` (GSPO, arXiv 2507.18071). Meant for `sequence_mean` and small
    clips."""
    xp = find_namespace(logprobs)
    sequence = stop_gradient(limit_log_ratio(_sequence_mean((logprobs - old_logprobs) * mask, mask)))
    return _clip_ratio(xp.exp(sequence[:, None] + (logprobs - stop_gradient(logprobs))), advantages, clip)


def cispo(logprobs: Array, old_logprobs: Array, advantages: Array, mask: Array, clip: Clip) -> Array:
    """``-sg(clip(r, 1 - low, 1 + high)) A log pi``: the weight is clipped, the gradient of no token is lost (CISPO, MiniMax-M1,
    arXiv 2506.13585). ``dual`` has no meaning here."""
    weight = _limit_ratio(token_ratio(logprobs, old_logprobs), 1.0 - clip.low, 1.0 + clip.high)
    return -stop_gradient(weight) * advantages * logprobs


def dppo_tv(logprobs: Array, old_logprobs: Array, advantages: Array, mask: Array, clip: Clip) -> Array:
    """``-keep A pi / mu``, where ``keep`` is 0 for tokens whose probability has already moved too far the wanted way:
    ``pi - mu > high`` with a positive advantage, ``pi - mu < -low`` with another (DPPO, binary total variation, arXiv
    2602.04879). ``low`` and ``high`` are differences of probabilities, not of ratios; ``old_logprobs`` should be the
    sampler's. ``dual`` has no meaning here. With 1e-3 of the squared log-ratio added (KL k2 at 2e-3) it is prime-rl's default.
    """
    xp = find_namespace(logprobs)
    now = stop_gradient(logprobs)
    outside = _has_moved_too_far(_compute_moved(now, old_logprobs), advantages, clip)
    losses = -token_ratio(logprobs, old_logprobs) * advantages
    return xp.where(outside, xp.zeros_like(losses), losses)


Objective = Callable[[Array, Array, Array, Array, Clip], Array]

OBJECTIVES: dict[str, Objective] = {
    "ppo_clip": ppo_clip,
    "gspo": gspo,
    "cispo": cispo,
    "dppo_tv": dppo_tv,
}
"""Objectives by the name that a configuration gives."""


def token_ratio(logprobs: Array, old_logprobs: Array) -> Array:
    """``pi / pi_old`` per token, of which the logarithm is kept within `MAX_LOG_RATIO`."""
    return find_namespace(logprobs).exp(limit_log_ratio(logprobs - old_logprobs))


def limit_log_ratio(difference: Array) -> Array:
    """Log-ratios within `MAX_LOG_RATIO`; beyond it they have no gradient."""
    return _limit_ratio(difference, -MAX_LOG_RATIO, MAX_LOG_RATIO)


def find_clipped(objective: str, logprobs: Array, old_logprobs: Array, advantages: Array, mask: Array, clip: Clip) -> Array:
    """True [B, T] where ``objective`` limits a token: no gradient reaches it, or (``cispo``) less weight than its ratio."""
    if objective == "dppo_tv":
        moved = _compute_moved(logprobs, old_logprobs)
        return _has_moved_too_far(moved, advantages, clip)
    difference = logprobs - old_logprobs
    if objective == "gspo":
        xp = find_namespace(difference)
        difference = _sequence_mean(difference * mask, mask)[:, None] * xp.ones_like(difference)
    ratio = find_namespace(difference).exp(limit_log_ratio(difference))
    if objective == "cispo":
        return (ratio > 1.0 + clip.high) | (ratio < 1.0 - clip.low)
    return outside_clip(ratio, advantages, clip)


def outside_clip(ratio: Array, advantages: Array, clip: Clip) -> Array:
    """True where `ppo_clip` gives a token no gradient: its ratio has already moved past the clip in the wanted direction."""
    return ((advantages > 0) & (ratio > 1.0 + clip.high)) | ((advantages < 0) & (ratio < 1.0 - clip.low))


def token_mean(losses: Array, mask: Array, *, tokens: float) -> Array:
    """``sum(losses) / tokens``: each token of the batch weighs the same (DAPO). ``tokens`` is the number of sampled tokens of
    the whole batch, of which ``losses`` may be a part, so that the parts add up."""
    return find_namespace(losses).sum(losses * mask) / tokens


def sequence_mean(losses: Array, mask: Array, *, sequences: float) -> Array:
    """The mean over sequences of the mean over a sequence's tokens (GRPO, GSPO); ``sequences`` counts the whole batch."""
    return find_namespace(losses).sum(_sequence_mean(losses * mask, mask)) / sequences


def sequence_sum(losses: Array, mask: Array, *, sequences: float) -> Array:
    """The mean over sequences of the sum over a sequence's tokens: REINFORCE's own, long sequences weigh more."""
    return find_namespace(losses).sum(losses * mask) / sequences


def constant_mean(losses: Array, mask: Array, *, sequences: float, length: float) -> Array:
    """``sum(losses) / (sequences * length)`` with a constant ``length``: no bias by the length of a sequence (Dr. GRPO)."""
    return find_namespace(losses).sum(losses * mask) / (sequences * length)


def _compute_moved(logprobs: Array, old_logprobs: Array) -> Array:
    xp = find_namespace(logprobs)
    return xp.exp(logprobs) - xp.exp(old_logprobs)


def _has_moved_too_far(moved: Array, advantages: Array, clip: Clip) -> Array:
    return ((advantages > 0) & (moved > clip.high)) | ((advantages <= 0) & (moved < -clip.low))


def _clip_ratio(ratio: Array, advantages: Array, clip: Clip) -> Array:
    xp = find_namespace(ratio)
    losses = xp.maximum(-ratio * advantages, -_limit_ratio(ratio, 1.0 - clip.low, 1.0 + clip.high) * advantages)
    if clip.dual is None:
        return losses
    return xp.where(advantages < 0, xp.minimum(losses, -clip.dual * advantages), losses)


def _limit_ratio(values: Array, low: float, high: float) -> Array:
    return find_namespace(values).clip(values, low, high)


def _sequence_mean(masked: Array, mask: Array) -> Array:
    xp = find_namespace(masked)
    return xp.sum(masked, -1) / _limit_ratio(xp.sum(mask, -1), 1.0, float("inf"))
