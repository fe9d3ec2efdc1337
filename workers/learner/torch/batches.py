"""Token sequences as tensors: the prefix that all of a batch share, and micro-batches of similar length. No model here."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

SHORTEST_PREFIX = 16
"""A shared prefix of fewer tokens is not worth a pass of its own."""


class MicroBatch(msgspec.Struct, frozen=True, kw_only=True):
    """Sequences without their shared prefix, right-padded, and where their sampled tokens stand.

    ``indices``: which sequences of the batch these are, B of them. ``ids`` int64 [B, S]: suffixes, padded with 0.
    ``rows`` and ``columns`` int64 [N]: the positions in ``ids`` whose next token was sampled; ``targets`` int64 [N]: that
    token. ``places`` int64 [N]: where each sampled token stands in a flattened array [B, ``width``] of sampled tokens only.
    """

    indices: tuple[int, ...]
    ids: torch.Tensor
    rows: torch.Tensor
    columns: torch.Tensor
    targets: torch.Tensor
    places: torch.Tensor
    width: int

    def rowwise(self, values: torch.Tensor) -> torch.Tensor:
        """Values of sampled tokens [N] as rows of sequences [B, ``width``], 0 where a sequence has no more."""
        flat = values.new_zeros(len(self.ids) * self.width)
        return flat.index_put((self.places,), values).view(len(self.ids), self.width)

    def to(self, device: torch.device) -> MicroBatch:
        moved = {name: getattr(self, name).to(device) for name in ("ids", "rows", "columns", "targets", "places")}
        return msgspec.structs.replace(self, **moved)


def shared_prefix(ids: Sequence[NDArray[np.int32]], masks: Sequence[NDArray[np.bool_]]) -> int:
    """How many leading tokens all sequences share, leaving each at least the token before its first sampled one.

    0 when there are fewer than two sequences or the prefix is shorter than `SHORTEST_PREFIX`.
    """
    if len(ids) < 2:
        return 0
    limit = min(int(np.argmax(mask)) - 1 if mask.any() else len(mask) - 1 for mask in masks)
    first = ids[0][: max(limit, 0)]
    for other in ids[1:]:
        differs = np.nonzero(first != other[: len(first)])[0]
        if len(differs):
            first = first[: differs[0]]
    return len(first) if len(first) >= SHORTEST_PREFIX else 0


def micro_batches(
    ids: Sequence[NDArray[np.int32]],
    masks: Sequence[NDArray[np.bool_]],
    *,
    prefix: int,
    size: int,
    among: Iterable[int] | None = None,
) -> Iterator[MicroBatch]:
    """The sequences (of them, those ``among``) in micro-batches of ``size``, sorted by length so that little is padded."""
    order = sorted(range(len(ids)) if among is None else among, key=lambda index: len(ids[index]))
    for start in range(0, len(order), size):
        chosen = tuple(order[start : start + size])
        yield _micro_batch(chosen, [ids[index][prefix:] for index in chosen], [masks[index][prefix:] for index in chosen])


def _micro_batch(indices: tuple[int, ...], ids: list[NDArray[np.int32]], masks: list[NDArray[np.bool_]]) -> MicroBatch:
    # The last token predicts nothing, so it is not run.
    padded = np.zeros((len(ids), max(len(sequence) for sequence in ids) - 1), np.int64)
    for row, sequence in enumerate(ids):
        padded[row, : len(sequence) - 1] = sequence[:-1]
    columns = [np.nonzero(mask[1:])[0] for mask in masks]
    counts = [len(found) for found in columns]
    width = max(counts)
    return MicroBatch(
        indices=indices,
        ids=torch.from_numpy(padded),
        rows=torch.from_numpy(np.repeat(np.arange(len(ids)), counts)),
        columns=torch.from_numpy(np.concatenate(columns)),
        targets=torch.from_numpy(np.concatenate([s[1:][m[1:]] for s, m in zip(ids, masks, strict=True)]).astype(np.int64)),
        places=torch.from_numpy(np.concatenate([row * width + np.arange(count) for row, count in enumerate(counts)])),
        width=width,
    )
