"""One policy loss out of its parts: objective, correction, KL and reduction by name. Pure.

Same shapes as `objectives`: [B, T]. There are three policies: mu sampled the tokens, pi_old is the trainer's
before the first update of the batch, pi is the current one. With a correction the loss is that of decoupled PPO (AReaL, arXiv
2505.24298), ``w(pi_old / mu) * objective(pi / pi_old)``; without one the ratio is taken to mu itself ("bypass").
"""

from fleetbus.config.settings import AlgorithmSettings
from fleetbus.core.algorithms.arrays import Array
from fleetbus.core.algorithms.corrections import CORRECTIONS, KL_ESTIMATORS
from fleetbus.core.algorithms.objectives import (
    OBJECTIVES,
    Clip,
    Objective,
    constant_mean,
    sequence_mean,
    sequence_sum,
    token_mean,
    token_ratio,
)

REDUCTIONS = ("token_mean", "sequence_mean", "sequence_sum", "constant_mean")


class LossPlan(AlgorithmSettings, frozen=True, kw_only=True):
    """The parts of a loss, and their numbers. ``old_policy`` "auto": pi_old where a rollout_correction is on, else mu.
    ``kl_coefficient`` 0 leaves the KL out; ``kl_place`` "reward" takes it out of the advantages instead of adding it to the
    loss."""

    clip: Clip = Clip(low=0.2, high=0.28)

    @property
    def uses_proximal(self) -> bool:
        """True if pi_old matters beside mu."""
        return self.rollout_correction != "none" or self.old_policy == "trainer"


def select_old_logprobs(plan: LossPlan, sampler: Array, proximal: Array) -> Array:
    """The log-probabilities that the objective's ratio is taken to."""
    to_trainer = plan.old_policy == "trainer" or (plan.old_policy == "auto" and plan.rollout_correction != "none")
    return proximal if to_trainer else sampler


def compute_token_losses(
    plan: LossPlan,
    objective: Objective | None = None,
    /,
    *,
    logprobs: Array,
    sampler: Array,
    proximal: Array,
    advantages: Array,
    mask: Array,
    reference: Array | None = None,
    entropies: Array | None = None,
) -> Array:
    """The loss of every token: ``weight * objective + coefficient * KL(pi || reference) - coefficient * entropy``, the KL
    times the ratio with ``kl_ratio_weight`` (DeepSeek-V3.2, arXiv 2512.02556).

    ``entropies`` are those of the policy at each token, with gradient; ``objective`` takes the place of the plan's.
    ``sampler`` is log mu, ``proximal`` log pi_old, ``reference`` what the KL pulls to (None: mu). A KL in the reward is the
    caller's to take out of ``advantages`` (`fleetbus.core.algorithms.corrections.kl_penalty`).
    """
    compute = objective or OBJECTIVES[plan.objective]
    losses = compute(logprobs, select_old_logprobs(plan, sampler, proximal), advantages, mask, plan.clip)
    if plan.rollout_correction != "none":
        weigh = CORRECTIONS[plan.rollout_correction]
        losses = losses * weigh(proximal - sampler, mask, low=plan.rollout_correction_low, high=plan.rollout_correction_high)
    if plan.kl_coefficient and plan.kl_place == "loss":
        target = sampler if reference is None else reference
        divergence = KL_ESTIMATORS[plan.kl_estimator](logprobs, target)
        if plan.kl_ratio_weight:
            divergence = divergence * token_ratio(logprobs, select_old_logprobs(plan, sampler, proximal))
        losses = losses + plan.kl_coefficient * divergence
    if plan.entropy_coefficient and entropies is not None:
        losses = losses - plan.entropy_coefficient * entropies
    return losses


def reduce_losses(
    plan: LossPlan, losses: Array, mask: Array, *, tokens: float, sequences: float, shares: Array | None = None
) -> Array:
    """One number. ``tokens`` and ``sequences`` count the whole batch, so that the parts of a batch add up; tokens that a
    correction dropped still count.

    Rows are leaves of episodes. ``shares`` [B] is the part of its sequence's sampled tokens that each row holds: with
    ``segment_weight`` "episode" the leaves of an episode are one sequence, so their means add up to the mean over all its
    tokens; with "segment" each is a sequence, and there are no shares. "token" is `token_mean` with every reduction."""
    if plan.reduction == "token_mean" or plan.segment_weight == "token":
        return token_mean(losses, mask, tokens=tokens)
    if plan.reduction == "sequence_mean":
        weighted = losses if shares is None else losses * shares[:, None]
        return sequence_mean(weighted, mask, sequences=sequences)
    if plan.reduction == "sequence_sum":
        return sequence_sum(losses, mask, sequences=sequences)
    return constant_mean(losses, mask, sequences=sequences, length=plan.loss_scale_factor)
