"""Batches as rows of one advantage each, in whole optimizer steps: what trainers take that count rows."""

from collections.abc import Iterator, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from fleetbus_workers.learner.base import TrainingSequence


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """A token sequence with arrays of length T, as in `TrainingSequence`; ``advantage`` is that of all tokens that
    ``loss_mask`` names. ``is_filler``: nothing is learned from it."""

    episode_id: str
    group_id: str
    ids: NDArray[np.int32]
    loss_mask: NDArray[np.bool_]
    logprobs: NDArray[np.float32]
    advantage: float
    is_filler: bool = False


def build_rows(batch: Sequence[TrainingSequence]) -> Iterator[Row]:
    """Rows that train every token of the batch once. A sequence with rewards on the way has a row per advantage; trainers that
    share what rows begin with compute it once. The first token of a sequence is predicted by nothing."""
    for sequence in batch:
        trained = sequence.loss_mask.copy()
        trained[:1] = False
        for advantage in dict.fromkeys(sequence.advantages[trained].tolist()):
            yield Row(
                episode_id=sequence.episode_id,
                group_id=sequence.group_id,
                ids=sequence.ids,
                loss_mask=trained & (sequence.advantages == np.float32(advantage)),
                logprobs=sequence.logprobs,
                advantage=advantage,
            )


def build_filler(rows: Sequence[Row]) -> Row:
    """One token without an advantage: its gradient is zero. It is a sampled one, so that it moves no mean of log-probabilities
    away, and the one that the fewest tokens stand before; where nothing was sampled, one that every model has."""
    if not rows:
        return Row(
            episode_id="",
            group_id="",
            ids=np.zeros(2, np.int32),
            loss_mask=np.array([False, True]),
            logprobs=np.zeros(2, np.float32),
            advantage=0.0,
            is_filler=True,
        )
    place, row = min(((int(row.loss_mask.argmax()), row) for row in rows), key=lambda each: each[0])
    return Row(
        episode_id=row.episode_id,
        group_id=row.group_id,
        ids=row.ids[: place + 1],
        loss_mask=np.arange(place + 1) == place,
        logprobs=row.logprobs[: place + 1],
        advantage=0.0,
        is_filler=True,
    )


def spread_fillers(rows: Sequence[Row], filler: Row, count: int) -> Iterator[Row]:
    """The rows in their order, with ``count`` fillers between them at equal distances: parts of a step weigh about the same."""
    total, given = len(rows) + count, iter(rows)
    for index in range(total):
        is_filler = (index + 1) * count // total > index * count // total
        yield filler if is_filler else next(given)
