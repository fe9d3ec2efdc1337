"""Adds to the advantages of a batch, token by token, what is known only with log-probabilities: a KL, a teacher."""

from collections.abc import Sequence

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from fleetbus.config.settings import AlgorithmSettings
from fleetbus.core.algorithms.advantages import normalise_tokens
from fleetbus.core.algorithms.corrections import KL_ESTIMATORS, kl_penalty
from fleetbus.core.algorithms.objectives import MAX_LOG_RATIO
from fleetbus_workers.learner.base import TrainingSequence

Rows = Sequence[NDArray[np.float32]]
"""Per sequence one number for each of its sampled tokens."""


def apply_kl_penalty(
    batch: Sequence[TrainingSequence],
    algorithm: AlgorithmSettings,
    policy: Sequence[torch.Tensor],
    reference: Sequence[torch.Tensor] | None,
) -> list[TrainingSequence]:
    """The batch with the KL of ``policy`` to ``reference`` (None: the sampler's) taken out of its advantages."""
    own, target = _to_rows(policy), _take(batch, "logprobs") if reference is None else _to_rows(reference)
    width = max(map(len, own))
    rows = [np.stack([np.pad(row, (0, width - len(row))) for row in found]) for found in (own, target)]
    mask = np.stack([np.arange(width) < len(row) for row in own]).astype(np.float32)
    penalty = algorithm.kl_coefficient * kl_penalty(KL_ESTIMATORS[algorithm.kl_estimator](*rows), mask)
    return _add(batch, [row[: len(found)] for row, found in zip(penalty, own, strict=True)])


def normalise(batch: Sequence[TrainingSequence]) -> list[TrainingSequence]:
    """The batch with its advantages normalised over all sampled tokens."""
    masks = [sequence.loss_mask for sequence in batch]
    flat = normalise_tokens(
        np.concatenate([sequence.advantages for sequence in batch]).astype(np.float64), np.concatenate(masks).astype(np.float64)
    )
    parts = np.split(flat.astype(np.float32), np.cumsum([len(mask) for mask in masks])[:-1])
    return [msgspec.structs.replace(sequence, advantages=part) for sequence, part in zip(batch, parts, strict=True)]


def add_teacher(
    batch: Sequence[TrainingSequence], coefficient: float, teacher: Sequence[torch.Tensor]
) -> tuple[list[TrainingSequence], float]:
    """The batch with ``coefficient * (log teacher - log mu)`` added to the advantage of each sampled token, and the mean of
    ``log mu - log teacher``, the reverse KL: on-policy distillation (arXiv 2306.13649; "On-Policy Distillation",
    thinkingmachines.ai, 2025). The difference is kept within `MAX_LOG_RATIO`: a teacher may rule a token out."""
    gaps = [
        np.clip(found - own, -MAX_LOG_RATIO, MAX_LOG_RATIO)
        for found, own in zip(_to_rows(teacher), _take(batch, "logprobs"), strict=True)
    ]
    found = np.concatenate(gaps)
    return _add(batch, [coefficient * gap for gap in gaps]), -float(found.mean()) if len(found) else 0.0


def _add(batch: Sequence[TrainingSequence], rows: Rows) -> list[TrainingSequence]:
    changed = []
    for sequence, row in zip(batch, rows, strict=True):
        advantages = sequence.advantages.copy()
        advantages[sequence.loss_mask] += row.astype(np.float32)
        changed.append(msgspec.structs.replace(sequence, advantages=advantages))
    return changed


def _take(batch: Sequence[TrainingSequence], name: str) -> Rows:
    return [getattr(sequence, name)[sequence.loss_mask] for sequence in batch]


def _to_rows(tensors: Sequence[torch.Tensor]) -> Rows:
    return [tensor.float().cpu().numpy() for tensor in tensors]
