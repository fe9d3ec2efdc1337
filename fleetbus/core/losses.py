"""One policy loss out of its parts: objective, correction, KL and reduction by name. Pure.

Same shapes as `fleetbus.core.objectives`: [B, T]. Three policies are told apart: mu sampled the tokens, pi_old is the trainer's
before the first update of the batch, pi is the current one. With a correction the loss is that of decoupled PPO (AReaL, arXiv
2505.24298), ``w(pi_old / mu) * objective(pi / pi_old)``; without one the ratio is taken to mu itself ("bypass").
"""

from __future__ import annotations

from typing import Literal

import msgspec

from fleetbus.core.arrays import Array
from fleetbus.core.corrections import CORRECTIONS, KL_ESTIMATORS
from fleetbus.core.objectives import OBJECTIVES, Clip, constant_mean, sequence_mean, sequence_sum, token_mean

Reduction = Literal["token_mean", "sequence_mean", "sequence_sum", "constant_mean"]

REDUCTIONS: tuple[Reduction, ...] = ("token_mean", "sequence_mean", "sequence_sum", "constant_mean")


class LossPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Which parts, and their numbers. ``ratio_to`` "auto": pi_old where a correction is on, else mu. ``kl_coefficient`` 0
    leaves the KL out; "reward" takes it out of the advantages instead of adding it to the loss."""

    objective: str = "ppo_clip"
    clip_low: float = 0.2
    clip_high: float = 0.28
    dual_clip: float | None = None
    correction: str = "none"
    correction_low: float = 0.5
    correction_high: float = 2.0
    ratio_to: Literal["auto", "sampler", "trainer"] = "auto"
    kl_estimator: str = "k3"
    kl_coefficient: float = 0.0
    kl_place: Literal["loss", "reward"] = "loss"
    reduction: Reduction = "token_mean"
    constant_length: int = 1024

    @property
    def clip(self) -> Clip:
        """The three numbers of the clip, as objectives take them."""
        return Clip(low=self.clip_low, high=self.clip_high, dual=self.dual_clip)

    @property
    def uses_proximal(self) -> bool:
        """True if pi_old matters beside mu."""
        return self.correction != "none" or self.ratio_to == "trainer"


def ratio_base(plan: LossPlan, sampler: Array, proximal: Array) -> Array:
    """The log-probabilities that the objective's ratio is taken to."""
    to_trainer = plan.ratio_to == "trainer" or (plan.ratio_to == "auto" and plan.correction != "none")
    return proximal if to_trainer else sampler


def token_losses(
    plan: LossPlan,
    *,
    logprobs: Array,
    sampler: Array,
    proximal: Array,
    advantages: Array,
    mask: Array,
    reference: Array | None = None,
) -> Array:
    """The loss of every token: ``weight * objective + coefficient * KL(pi || reference)``.

    ``sampler`` is log mu, ``proximal`` log pi_old, ``reference`` what the KL pulls to (None: mu). A KL in the reward is the
    caller's to take out of ``advantages`` (`fleetbus.core.corrections.kl_penalty`).
    """
    losses = OBJECTIVES[plan.objective](logprobs, ratio_base(plan, sampler, proximal), advantages, mask, plan.clip)
    if plan.correction != "none":
        weigh = CORRECTIONS[plan.correction]
        losses = losses * weigh(proximal - sampler, mask, low=plan.correction_low, high=plan.correction_high)
    if plan.kl_coefficient and plan.kl_place == "loss":
        target = sampler if reference is None else reference
        losses = losses + plan.kl_coefficient * KL_ESTIMATORS[plan.kl_estimator](logprobs, target)
    return losses


def reduce_losses(plan: LossPlan, losses: Array, mask: Array, *, tokens: float, sequences: float) -> Array:
    """One number. ``tokens`` and ``sequences`` count the whole batch, so that the parts of a batch add up; tokens that a
    correction dropped still count."""
    if plan.reduction == "token_mean":
        return token_mean(losses, mask, tokens=tokens)
    if plan.reduction == "sequence_mean":
        return sequence_mean(losses, mask, sequences=sequences)
    if plan.reduction == "sequence_sum":
        return sequence_sum(losses, mask, sequences=sequences)
    return constant_mean(losses, mask, sequences=sequences, length=plan.constant_length)
