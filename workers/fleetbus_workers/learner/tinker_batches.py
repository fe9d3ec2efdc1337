"""Training sequences as a Tinker service takes them, and what its answers say about the step. Pure NumPy."""

import math

import msgspec
import numpy as np
from numpy.typing import NDArray

from fleetbus_workers.learner.base import TrainingSequence


class DatumArrays(msgspec.Struct, frozen=True, kw_only=True):
    """One sequence, shifted by one: ``inputs`` are ids 0..T-2, everything else belongs to ids 1..T-1."""

    inputs: list[int]
    loss_inputs: dict[str, NDArray[np.generic]]


def build_datum_arrays(sequence: TrainingSequence, tokens: int) -> DatumArrays:
    """``tokens`` sampled tokens are in the whole step: advantages are divided by them, because a service sums over tokens.

    The loss mask is the advantage: where nothing was sampled it is zero, and so is the gradient.
    """
    mask = sequence.loss_mask[1:]
    return DatumArrays(
        inputs=sequence.ids[:-1].tolist(),
        loss_inputs={
            "target_tokens": sequence.ids[1:].astype(np.int64),
            "logprobs": np.where(mask, sequence.logprobs[1:], 0).astype(np.float32),
            "advantages": np.where(mask, sequence.advantages[1:] / max(tokens, 1), 0).astype(np.float32),
        },
    )


class TinkerMetrics:
    """Metrics of one batch out of the log-probabilities that the service answers, over sampled tokens."""

    def __init__(self, clip_ratio_low: float, clip_ratio_high: float) -> None:
        self._low, self._high = 1 - clip_ratio_low, 1 + clip_ratio_high
        self._ratios: list[NDArray[np.float64]] = []
        self._advantages: list[NDArray[np.float64]] = []
        self._differences: list[NDArray[np.float64]] = []

    def add(self, sequence: TrainingSequence, logprobs: NDArray[np.float32], fresh: int | None) -> None:
        """``logprobs`` are the trainer's for ids 1..T-1; ``fresh`` the version whose weights answered, if it is one."""
        mask = sequence.loss_mask[1:]
        difference = (logprobs[: len(mask)].astype(np.float64) - sequence.logprobs[1:])[mask]
        self._ratios.append(np.exp(np.clip(difference, -20, 20)))
        self._advantages.append(sequence.advantages[1:][mask].astype(np.float64))
        if fresh is not None:
            self._differences.append(np.abs(difference[sequence.versions[1:][mask] == fresh]))

    def metrics(self) -> dict[str, float]:
        """``loss`` is the unclipped surrogate, -mean(ratio x advantage): its fall is the policy's gain on the batch."""
        if not self._ratios:
            names = ("loss", "entropy", "clip_fraction", "ratio_max", "logprob_difference_max", "logprob_difference_mean")
            return dict.fromkeys(names, math.nan)
        ratios, advantages = np.concatenate(self._ratios), np.concatenate(self._advantages)
        differences = np.concatenate(self._differences) if self._differences else np.zeros(0)
        clipped = np.where(advantages > 0, ratios > self._high, (ratios < self._low) & (advantages < 0))
        return {
            "loss": float(-(ratios * advantages).mean()),
            "entropy": math.nan,
            "clip_fraction": float(clipped.mean()),
            "ratio_max": float(ratios.max()),
            "ratio_mean": float(ratios.mean()),
            "kl": float((ratios - 1 - np.log(ratios)).mean()),
            "logprob_difference_max": float(differences.max()) if differences.size else math.nan,
            "logprob_difference_mean": float(differences.mean()) if differences.size else math.nan,
        }
