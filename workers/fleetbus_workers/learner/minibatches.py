"""The part of a batch that each optimizer step takes, and the sequences that none may take. Pure but for a log line."""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import structlog

from fleetbus_workers.learner.base import TrainingSequence

log = structlog.get_logger()


def split_minibatches(count: int, parts: int) -> list[slice]:
    """``count`` sequences in at most ``parts`` runs of nearly equal length, none empty."""
    bounds = [part * count // parts for part in range(parts + 1)]
    return [slice(start, stop) for start, stop in pairwise(bounds) if stop > start]


def drop_non_finite(batch: Sequence[TrainingSequence]) -> Sequence[TrainingSequence]:
    """The batch without sequences whose numbers are not finite: one would make the gradient of all of them NaN. Raises
    `ValueError` if none is left."""
    finite = [bool(np.isfinite(each.logprobs).all() and np.isfinite(each.advantages).all()) for each in batch]
    if all(finite):
        return batch
    faulty = [each.episode_id for each, good in zip(batch, finite, strict=True) if not good]
    log.warning("sequences have numbers that are not finite; training the others", episodes=faulty[:16], count=len(faulty))
    if not any(finite):
        raise ValueError(f"no sequence of the batch has finite log-probabilities and advantages: {', '.join(faulty[:3])} ...")
    return [each for each, good in zip(batch, finite, strict=True) if good]
