"""Sequences that begin alike as one row: their common beginning once, then what follows it, branch after branch.

The episodes of a group answer the same prompt, so most tokens of a batch with short answers are prompts that were repeated. In
a row each token sees the beginning and its own branch alone, by a mask and by positions of its own. Above is the trainer; the
model that this is right for is found by `can_branch` (docs/decisions/0175).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from fleetbus_workers.learner.torch.batches import MicroBatch, group_padded, split_micro_batches

LONGEST_ROW = 1024
"""Tokens of a row with branches, because attention costs their square; a longer group is spread over several rows."""

LEAST_SAVED = 0.25
"""Share of the tokens that rows with branches have to save: masks of their own cost what plain causal attention does not."""


class Row(NamedTuple):
    """Sequences ``indices`` of a batch; they share ``stem`` tokens, and the branches have ``lengths`` tokens each that are
    run."""

    indices: tuple[int, ...]
    stem: int
    lengths: tuple[int, ...]

    @property
    def tokens(self) -> int:
        return self.stem + sum(self.lengths)


def split_batches(
    ids: Sequence[NDArray[Any]],
    masks: Sequence[NDArray[np.bool_]],
    groups: Sequence[str],
    subset: Sequence[int],
    *,
    prefix: int,
    size: int,
    budget: int,
    packing: bool,
) -> Iterator[MicroBatch]:
    """Micro-batches of ``subset``: with branches where ``groups`` has the group of every sequence and that saves tokens, else
    as `split_micro_batches` makes them."""
    if groups and subset:
        named = {index: groups[index] for index in subset}
        if (found := split_branched_batches(ids, masks, named, prefix=prefix, size=size, budget=budget)) is not None:
            return found
    return split_micro_batches(ids, masks, prefix=prefix, size=size, subset=subset, budget=budget, packing=packing)


def split_branched_batches(
    ids: Sequence[NDArray[Any]],
    masks: Sequence[NDArray[np.bool_]],
    groups: Mapping[int, str],
    *,
    prefix: int,
    size: int,
    budget: int = 0,
) -> Iterator[MicroBatch] | None:
    """The sequences that ``groups`` names by index, those of one group in one row or in several, in micro-batches of about
    ``size`` sequences and at most ``budget`` tokens (0: no limit). None if that saves too little. ``prefix``: leading tokens
    that are run elsewhere."""
    rows = list(_plan_rows(ids, masks, groups, prefix))
    plain = sum(len(ids[index]) - prefix - 1 for index in groups)
    if sum(row.tokens for row in rows) > (1 - LEAST_SAVED) * plain:
        return None
    width = max(len(row.indices) for row in rows)
    lengths = {number: row.tokens for number, row in enumerate(rows)}
    batches = group_padded(lengths, max(size // width, 1), budget)
    return (_build_batch([rows[number] for number in chosen], ids, masks, prefix) for chosen in batches)


def can_branch(model: PreTrainedModel) -> bool:
    """True if branches of one row do not see each other, tried on two short sequences with a common beginning."""
    vocabulary = model.get_input_embeddings().weight.shape[0]
    sequences = [np.arange(1, 9) % vocabulary, np.concatenate([np.arange(1, 5), np.arange(12, 20)]) % vocabulary]
    mask = np.arange(12) >= 4
    batch = _build_batch([Row((0, 1), 4, (3, 7))], sequences, [mask[:8], mask], 0).to(model.device)
    with torch.no_grad():
        try:
            together = model(
                input_ids=batch.ids, position_ids=batch.positions, attention_mask=batch.visible, use_cache=False
            ).logits[batch.rows, batch.columns]
        except (RuntimeError, ValueError, TypeError):  # an attention that takes no such mask
            return False
        alone = [
            model(input_ids=torch.from_numpy(each[None, :-1]).to(model.device), use_cache=False).logits[0, 3:]
            for each in sequences
        ]
    # Rounding grows with depth; seeing another branch changes far more.
    return torch.allclose(together, torch.cat(alone), atol=1e-2, rtol=1e-2)


def _plan_rows(
    ids: Sequence[NDArray[Any]], masks: Sequence[NDArray[np.bool_]], groups: Mapping[int, str], prefix: int
) -> Iterator[Row]:
    members: dict[str, list[int]] = {}
    for index, group in groups.items():
        members.setdefault(group, []).append(index)
    for indices in members.values():
        stem = _count_common([ids[index] for index in indices], [masks[index] for index in indices]) - prefix
        row: list[int] = []
        room = LONGEST_ROW - stem
        for index in indices:
            length = len(ids[index]) - 1 - prefix - stem
            if row and length > room:
                yield _close_row(row, ids, prefix, stem)
                row, room = [], LONGEST_ROW - stem
            row.append(index)
            room -= length
        yield _close_row(row, ids, prefix, stem)


def _close_row(indices: Sequence[int], ids: Sequence[NDArray[Any]], prefix: int, stem: int) -> Row:
    return Row(tuple(indices), stem, tuple(len(ids[index]) - 1 - prefix - stem for index in indices))


def _count_common(ids: Sequence[NDArray[Any]], masks: Sequence[NDArray[np.bool_]]) -> int:
    """The number of leading tokens that all sequences share, none of them sampled and none the last of a sequence."""
    stop = min(int(np.argmax(mask)) if mask.any() else len(mask) - 1 for mask in masks)
    first = ids[0][:stop]
    for other in ids[1:]:
        differs = np.nonzero(first != other[: len(first)])[0]
        first = first[: differs[0]] if len(differs) else first
    return len(first)


def _build_batch(
    rows: Sequence[Row], ids: Sequence[NDArray[Any]], masks: Sequence[NDArray[np.bool_]], prefix: int
) -> MicroBatch:
    width = max(row.tokens for row in rows)
    tokens = np.zeros((len(rows), width), np.int64)
    positions, branches = np.zeros_like(tokens), np.full_like(tokens, -1)
    columns: list[NDArray[np.int64]] = []
    for number, row in enumerate(rows):
        first = ids[row.indices[0]][prefix:]
        tokens[number, : row.stem] = first[: row.stem]
        positions[number, : row.stem] = prefix + np.arange(row.stem)
        branches[number, : row.stem] = 0
        at = row.stem
        for branch, (index, length) in enumerate(zip(row.indices, row.lengths, strict=True), start=1):
            span, start = slice(at, at + length), prefix + row.stem
            tokens[number, span] = ids[index][start : start + length]
            positions[number, span] = start + np.arange(length)
            branches[number, span] = branch
            # The token that predicts the one after it: in the beginning, or in this branch.
            source = np.nonzero(masks[index][prefix + 1 :])[0]
            columns.append(np.where(source < row.stem, source, source - row.stem + at))
            at += length
    order = [index for row in rows for index in row.indices]
    counts = [len(found) for found in columns]
    sampled = max(counts)
    return MicroBatch(
        indices=tuple(order),
        ids=torch.from_numpy(tokens),
        rows=torch.from_numpy(np.repeat(np.repeat(np.arange(len(rows)), [len(row.indices) for row in rows]), counts)),
        columns=torch.from_numpy(np.concatenate(columns)),
        targets=torch.from_numpy(np.concatenate([ids[each][1:][masks[each][1:]] for each in order]).astype(np.int64)),
        places=torch.from_numpy(np.concatenate([place * sampled + np.arange(count) for place, count in enumerate(counts)])),
        width=sampled,
        positions=torch.from_numpy(positions),
        visible=torch.from_numpy(_build_mask(branches, prefix)),
    )


def _build_mask(branches: NDArray[np.int64], prefix: int) -> NDArray[np.bool_]:
    """The tokens that each token sees, [R, 1, S, ``prefix`` + S], for the ``branches`` [R, S] of the tokens (0: the beginning,
    -1: padding)."""
    causal = np.tril(np.ones((branches.shape[1],) * 2, bool))
    own = (branches[:, None, :] == 0) | (branches[:, None, :] == branches[:, :, None])
    before = np.ones((*branches.shape, prefix), bool)
    return np.concatenate([before, own & causal], axis=-1)[:, None]
