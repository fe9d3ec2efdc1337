"""The loss of one micro-batch as the settings say, and what is measured on the way. The formulae are in `fleetbus.core`."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from fleetbus.core.algorithms.corrections import kl_k3
from fleetbus.core.algorithms.losses import LossPlan, compute_token_losses, reduce_losses, select_old_logprobs
from fleetbus.core.algorithms.objectives import Objective, find_clipped, token_ratio
from fleetbus_workers.learner.base import TrainingSequence
from fleetbus_workers.learner.torch.batches import MicroBatch
from fleetbus_workers.learner.torch.sharding import Shards
from fleetbus_workers.learner.torch.token_scores import Scores
from fleetbus_workers.learner.torch.token_trace import TokenTrace

SMALLEST_SPREAD = 1e-4
"""Variance of log-probabilities below which a slope says nothing."""


class Totals(NamedTuple):
    """Of one optimizer step: the denominators of the reductions, and of each of its leaves the part of its sequence's sampled
    tokens that it holds."""

    tokens: int
    sequences: int
    shares: tuple[float, ...]

    @classmethod
    def from_sequences(cls, batch: Sequence[TrainingSequence], plan: LossPlan) -> Totals:
        """Totals by sequence, which ``plan.segment_weight`` defines: the leaves of an episode in this step, or each leaf."""
        counts = [int(leaf.loss_mask.sum()) for leaf in batch]
        tokens = max(sum(counts), 1)
        if plan.segment_weight == "segment":
            return cls(tokens, len(batch), (1.0,) * len(batch))
        by_episode: Counter[str] = Counter()
        for leaf, count in zip(batch, counts, strict=True):
            by_episode[leaf.episode_id] += count
        shares = [count / (by_episode[leaf.episode_id] or 1) for leaf, count in zip(batch, counts, strict=True)]
        return cls(tokens, len(by_episode), tuple(shares))


class SampledTokens(NamedTuple):
    """The N sampled tokens of a micro-batch, in its order: ``logprobs`` (the sampler's) and ``advantages`` float32 [N],
    ``versions`` int32 [N], ``sequences`` int64 [N], the number of each one's in the batch, and ``temperature``, float32 [N] or
    one for all of them."""

    logprobs: torch.Tensor
    advantages: torch.Tensor
    versions: torch.Tensor
    sequences: torch.Tensor
    temperature: torch.Tensor | float

    @classmethod
    def from_sequences(cls, batch: Sequence[TrainingSequence], indices: Sequence[int], device: torch.device) -> SampledTokens:
        chosen = [batch[index] for index in indices]
        counts = [int(each.loss_mask.sum()) for each in chosen]
        arrays = (
            [s.logprobs[s.loss_mask] for s in chosen],
            [s.advantages[s.loss_mask] for s in chosen],
            [s.versions[s.loss_mask] for s in chosen],
            [np.full(count, index) for index, count in zip(indices, counts, strict=True)],
        )
        logprobs, advantages, versions, sequences = (torch.from_numpy(np.concatenate(array)).to(device) for array in arrays)
        # Greedy episodes carry log-probabilities at temperature 1.
        temperatures = [each.temperature or 1.0 for each in chosen]
        temperature: torch.Tensor | float = temperatures[0]
        if len(set(temperatures)) > 1:  # else one number: to divide by it costs less, and by 1 nothing
            temperature = torch.from_numpy(np.repeat(np.array(temperatures, np.float32), counts)).to(device)
        return cls(logprobs, advantages, versions, sequences, temperature)


class ScoredBatch(NamedTuple):
    """A micro-batch with scores of its sampled tokens; one that does not count is run along with other processes'."""

    batch: MicroBatch
    tokens: SampledTokens
    scores: Scores
    counts: bool


class LossMetrics:
    """Sums and maxima over the tokens of all micro-batches of one call of the trainer."""

    def __init__(self, trace: TokenTrace | None = None) -> None:
        self.trace = trace or TokenTrace(on=False)
        self._sums: dict[str, float] = dict.fromkeys(("tokens", "loss", "entropy", "clip_fraction", "ratio_mean", "kl"), 0.0)
        self._ratio_max = 0.0
        self._difference_max = math.nan
        self._difference_sum = self._differences = 0.0
        self._moments = [0.0] * 4
        self._by_sequence: dict[int, tuple[float, int]] = {}

    def add_loss(self, loss: torch.Tensor) -> None:
        self._sums["loss"] += loss.item()

    def add_tokens(self, *, entropies: torch.Tensor, ratio: torch.Tensor, clipped: torch.Tensor, kl: torch.Tensor) -> None:
        if not len(ratio):
            return
        self._sums["tokens"] += len(ratio)
        for name, values in (("entropy", entropies), ("clip_fraction", clipped), ("ratio_mean", ratio), ("kl", kl)):
            self._sums[name] += values.double().sum().item()
        self._ratio_max = max(self._ratio_max, ratio.max().item())

    def add_differences(self, tokens: SampledTokens, trainer: torch.Tensor, fresh: torch.Tensor) -> None:
        """Of the log-probabilities that sampler and ``trainer`` computed with the same weights, which ``fresh`` is true of."""
        sampler, trainer = tokens.logprobs[fresh], trainer[fresh]
        if not len(sampler):
            return
        sizes = (trainer - sampler).abs()
        largest = sizes.max().item()
        self._difference_sum += sizes.double().sum().item()
        self._differences += len(sizes)
        self._difference_max = largest if math.isnan(self._difference_max) else max(self._difference_max, largest)
        x, y = trainer.double(), sampler.double()
        self._moments = [total + each.sum().item() for total, each in zip(self._moments, (x, y, x * x, x * y), strict=True)]
        sequences, place, counts = torch.unique(tokens.sequences[fresh], return_inverse=True, return_counts=True)
        sums = torch.zeros(len(sequences), dtype=torch.float64, device=sizes.device).index_add(0, place, sizes.double())
        for sequence, total, count in zip(sequences.tolist(), sums.tolist(), counts.tolist(), strict=True):
            self._by_sequence[sequence] = total, count

    def list_differences(self, batch: Sequence[TrainingSequence]) -> dict[str, float]:
        """The mean size of the differences of each episode of ``batch`` that has any; its leaves together."""
        sums: defaultdict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
        for sequence, (total, count) in self._by_sequence.items():
            held = sums[batch[sequence].episode_id]
            held[0] += total
            held[1] += count
        return {episode: total / count for episode, (total, count) in sums.items()}

    def gather(self, shards: Shards) -> None:
        """Enter what the other processes measured on their micro-batches."""
        *sums, self._difference_sum, self._differences = shards.sum_across(
            [*self._moments, *self._sums.values(), self._difference_sum, self._differences]
        )
        self._moments, sums = sums[:4], sums[4:]
        self._by_sequence = shards.merge_across(self._by_sequence)
        self._sums = dict(zip(self._sums, sums, strict=True))
        largest = -1.0 if math.isnan(self._difference_max) else self._difference_max
        self._ratio_max, largest = shards.max_across([self._ratio_max, largest])
        self._difference_max = largest if largest >= 0 else math.nan

    def metrics(self, updates: int, epochs: int) -> dict[str, float]:
        """Means per token; ``loss`` is the mean over updates, ``tokens`` counts each sampled token once. Differences to the
        sampler are left out where no token was trained."""
        tokens = max(self._sums["tokens"], 1.0)
        means = {name: total / tokens for name, total in self._sums.items() if name not in ("tokens", "loss")}
        measured = means | {
            "loss": self._sums["loss"] / updates,
            "tokens": self._sums["tokens"] / epochs,
            "ratio_max": self._ratio_max,
        }
        if not self._sums["tokens"]:
            return measured
        return measured | {
            "logprob_difference_max": self._difference_max,
            "logprob_difference_mean": self._difference_sum / self._differences if self._differences else math.nan,
            "logprob_slope": self._compute_slope(),
        }

    def _compute_slope(self) -> float:
        """The sampler's log-probabilities over the trainer's, by least squares: near 1 whatever the noise, and the ratio of
        temperatures where these differ. NaN without a spread."""
        x, y, xx, xy = self._moments
        count = max(self._differences, 1.0)
        spread = xx - x * x / count
        return (xy - x * y / count) / spread if spread > SMALLEST_SPREAD * count else math.nan


def compute_loss(
    plan: LossPlan,
    batch: MicroBatch,
    tokens: SampledTokens,
    scores: Scores,
    *,
    proximal: torch.Tensor | None,
    reference: torch.Tensor | None,
    totals: Totals,
    measured: LossMetrics,
    objective: Objective | None = None,
) -> torch.Tensor:
    """This micro-batch's share of the loss of its optimizer step. ``proximal`` [N]: the trainer's log-probabilities before the
    first update, None: now is before. ``reference`` [N]: those of the model that the KL pulls to, None: the sampler's.
    ``objective`` takes the place of the plan's; what it clips is not known."""
    if proximal is None:
        proximal = scores.logprobs.detach()
    mask = batch.to_rows(torch.ones_like(tokens.logprobs))
    losses = compute_token_losses(
        plan,
        objective,
        logprobs=batch.to_rows(scores.logprobs),
        sampler=batch.to_rows(tokens.logprobs),
        proximal=batch.to_rows(proximal),
        advantages=batch.to_rows(tokens.advantages),
        mask=mask,
        reference=None if reference is None else batch.to_rows(reference),
        entropies=batch.to_rows(scores.entropies) if plan.entropy_coefficient else None,
    )
    shares = torch.tensor([totals.shares[index] for index in batch.indices], dtype=mask.dtype, device=mask.device)
    loss: torch.Tensor = reduce_losses(plan, losses, mask, tokens=totals.tokens, sequences=totals.sequences, shares=shares)
    measured.add_loss(loss)
    with torch.no_grad():
        old = select_old_logprobs(plan, tokens.logprobs, proximal)
        ratio = token_ratio(scores.logprobs, old)
        now, before, advantages = (batch.to_rows(values) for values in (scores.logprobs, old, tokens.advantages))
        clipped = torch.zeros_like(ratio)
        if objective is None:
            clipped = find_clipped(plan.objective, now, before, advantages, mask, plan.clip).flatten()[batch.places]
        measured.trace.add(tokens.sequences, scores.logprobs, before=proximal, clipped=clipped)
        measured.add_tokens(
            entropies=scores.entropies, ratio=ratio, clipped=clipped, kl=kl_k3(tokens.logprobs, scores.logprobs)
        )
    return loss
