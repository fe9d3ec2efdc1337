"""Token sequences as tensors: the prefix that all of a batch share, and micro-batches, padded or packed. No model here."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from fleetbus_workers.learner.base import TrainingSequence
from fleetbus_workers.token_prefix import common_prefix_length

SHORTEST_PREFIX = 16
"""A shared prefix of fewer tokens is not worth a pass of its own."""

SHORTEST_MICRO_BATCH = 64
"""Tokens of padding that are not worth a micro-batch of its own."""


class MicroBatch(msgspec.Struct, frozen=True, kw_only=True):
    """Sequences without their shared prefix, and where their sampled tokens stand.

    ``indices``: which sequences of the batch these are, B of them. ``ids`` int64 [R, S]: suffixes, one per row and padded with
    0 on the right, or packed one after the other into a row. ``positions`` int64 [R, S]: with packing, the place of each token
    in its own sequence: the model sees where one ends. ``visible`` bool [R, 1, S, prefix + S]: what each token sees, where that
    is less than all before it. ``rows`` and ``columns`` int64 [U]: the places in ``ids`` whose next token was sampled;
    ``targets`` int64 [U]: that token. ``repeats`` int64 [N]: which of these each sampled token is, where sequences share some;
    without it U is N, in order. ``places`` int64 [N]: where each sampled token stands in a flattened array [B, ``width``] of
    sampled tokens only.
    """

    indices: tuple[int, ...]
    ids: torch.Tensor
    rows: torch.Tensor
    columns: torch.Tensor
    targets: torch.Tensor
    places: torch.Tensor
    width: int
    positions: torch.Tensor | None = None
    visible: torch.Tensor | None = None
    repeats: torch.Tensor | None = None

    def to_rows(self, values: torch.Tensor) -> torch.Tensor:
        """Values of sampled tokens [N] as rows of sequences [B, ``width``], 0 where a sequence has no more."""
        flat = values.new_zeros(len(self.indices) * self.width)
        return flat.index_put((self.places,), values).view(len(self.indices), self.width)

    def to(self, device: torch.device) -> MicroBatch:
        names = ("ids", "rows", "columns", "targets", "places", "positions", "visible", "repeats")
        moved = {name: value.to(device) for name in names if (value := getattr(self, name)) is not None}
        return msgspec.structs.replace(self, **moved)


def truncate_sequence(sequence: TrainingSequence, limit: int) -> TrainingSequence:
    """The first ``limit`` tokens of a sequence (0: all of it), fewer where that would cut through an image. The prompt stands
    at the front and is never cut before what was sampled after it; log-probabilities of the rest do not change, because the
    model is causal."""
    if not limit or len(sequence.ids) <= limit:
        return sequence
    limit = min([limit, *(image.start for image in sequence.images if image.start < limit < image.stop)])
    names = ("ids", "loss_mask", "logprobs", "advantages", "versions", *(["places"] if sequence.places is not None else []))
    arrays = {name: getattr(sequence, name)[:limit] for name in names}
    images = tuple(image for image in sequence.images if image.stop <= limit)
    return msgspec.structs.replace(sequence, images=images, **arrays)


def find_shared_prefix(ids: Sequence[NDArray[Any]], masks: Sequence[NDArray[np.bool_]]) -> int:
    """Number of leading tokens that all sequences share, leaving each at least the token before its first sampled one.

    0 when there are fewer than two sequences or the prefix is shorter than `SHORTEST_PREFIX`.
    """
    if len(ids) < 2:
        return 0
    limit = min(int(np.argmax(mask)) - 1 if mask.any() else len(mask) - 2 for mask in masks)
    length = max(limit, 0)
    for other in ids[1:]:
        length = common_prefix_length(ids[0][:length], other)
    return length if length >= SHORTEST_PREFIX else 0


def split_micro_batches(
    ids: Sequence[NDArray[Any]],
    masks: Sequence[NDArray[np.bool_]],
    *,
    prefix: int,
    size: int,
    subset: Iterable[int] | None = None,
    budget: int = 0,
    packing: bool = False,
) -> Iterator[MicroBatch]:
    """The sequences (of them, those ``subset``) in micro-batches of at most ``size`` and, padding included, ``budget`` tokens
    (0: no limit), sorted by length so that little is padded. With ``packing``: rows of up to ``budget`` tokens, one each."""
    chosen = range(len(ids)) if subset is None else subset
    lengths = {index: len(ids[index]) - prefix - 1 for index in chosen}
    for indices in group_packed(lengths, budget) if packing else group_padded(lengths, size, budget):
        suffixes, kept = [ids[index][prefix:] for index in indices], [masks[index][prefix:] for index in indices]
        yield _build_packed_batch(indices, suffixes, kept) if packing else _build_padded_batch(indices, suffixes, kept)


def group_padded(lengths: dict[int, int], size: int, budget: int) -> Iterator[tuple[int, ...]]:
    """Sequences of similar length together, at the least cost of all: tokens, padding included, and `SHORTEST_MICRO_BATCH` or
    an eighth of the budget for each micro-batch. One that exceeds the budget stands alone."""
    order = sorted(lengths, key=lambda index: lengths[index])
    overhead = budget // 8 or SHORTEST_MICRO_BATCH
    costs, starts = [0], [0]
    for stop in range(1, len(order) + 1):
        longest = lengths[order[stop - 1]]
        most = min(size, stop, max(budget // max(longest, 1), 1) if budget else stop)
        cost, rows = min((costs[stop - rows] + rows * longest, rows) for rows in range(1, most + 1))
        costs.append(cost + overhead)
        starts.append(stop - rows)
    batches, stop = [], len(order)
    while stop:
        batches.append(tuple(order[starts[stop] : stop]))
        stop = starts[stop]
    return reversed(batches)


def group_packed(lengths: dict[int, int], budget: int) -> Iterator[tuple[int, ...]]:
    """Rows of up to ``budget`` tokens by first fit, longest first: never more than 11/9 of the least number and one."""
    rows: list[list[int]] = []
    room: list[int] = []
    for index in sorted(lengths, key=lambda index: (-lengths[index], index)):
        row = next((number for number, left in enumerate(room) if lengths[index] <= left), None)
        if row is None:
            rows.append([])
            room.append(budget)
            row = len(rows) - 1
        rows[row].append(index)
        room[row] -= lengths[index]
    return (tuple(row) for row in rows)


def _build_padded_batch(indices: tuple[int, ...], ids: list[NDArray[Any]], masks: list[NDArray[np.bool_]]) -> MicroBatch:
    # The last token predicts nothing, so it is not run; of sequences of one token a model is run on padding alone.
    rows = np.zeros((len(ids), max(max(len(sequence) for sequence in ids) - 1, 1)), np.int64)
    for row, sequence in enumerate(ids):
        rows[row, : len(sequence) - 1] = sequence[:-1]
    columns = [np.nonzero(mask[1:])[0] for mask in masks]
    return _build_micro_batch(
        indices, rows, np.repeat(np.arange(len(ids)), [len(found) for found in columns]), columns, ids, masks
    )


def _build_packed_batch(indices: tuple[int, ...], ids: list[NDArray[Any]], masks: list[NDArray[np.bool_]]) -> MicroBatch:
    run = [sequence[:-1] for sequence in ids]
    run += [] if any(map(len, run)) else [np.zeros(1, np.int64)]
    row = np.concatenate(run).astype(np.int64)
    starts = np.cumsum([0] + [len(sequence) - 1 for sequence in ids[:-1]])
    columns = [start + np.nonzero(mask[1:])[0] for start, mask in zip(starts, masks, strict=True)]
    positions = np.concatenate([np.arange(len(part)) for part in run])
    batch = _build_micro_batch(indices, row[None], np.zeros(sum(map(len, columns)), np.int64), columns, ids, masks)
    return msgspec.structs.replace(batch, positions=torch.from_numpy(positions[None]))


def _build_micro_batch(
    indices: tuple[int, ...],
    rows: NDArray[np.int64],
    row_of: NDArray[np.int64],
    columns: list[NDArray[np.int64]],
    ids: list[NDArray[Any]],
    masks: list[NDArray[np.bool_]],
) -> MicroBatch:
    counts = [len(found) for found in columns]
    width = max(counts)
    return MicroBatch(
        indices=indices,
        ids=torch.from_numpy(rows),
        rows=torch.from_numpy(row_of),
        columns=torch.from_numpy(np.concatenate(columns)),
        targets=torch.from_numpy(np.concatenate([s[1:][m[1:]] for s, m in zip(ids, masks, strict=True)]).astype(np.int64)),
        places=torch.from_numpy(np.concatenate([row * width + np.arange(count) for row, count in enumerate(counts)])),
        width=width,
    )
