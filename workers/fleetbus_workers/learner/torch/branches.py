"""Sequences that begin alike as one row, a prefix tree of their tokens: what several of them begin with is run once.

The episodes of a group answer the same prompt, and their answers begin alike, the more so the surer the policy is. In a row
each token sees those before it in its own sequence alone, by a mask and by positions of its own; a sampled token of several
sequences is scored once. Above is the trainer; the model that this is right for is found by `can_branch`
(docs/decisions/0175, 0261-answers-that-begin-alike-are-run-once.md).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from fleetbus_workers.learner.torch.batches import MicroBatch, group_padded, split_micro_batches
from fleetbus_workers.learner.torch.forward import is_rounding
from fleetbus_workers.token_prefix import common_prefix_length

LONGEST_ROW = 1024
"""Tokens of a row with branches, because attention costs their square; a longer group is spread over several rows."""

LEAST_SAVED = 0.25
"""Share of the tokens that rows with branches have to save: masks of their own cost what plain causal attention does not."""


class Row(NamedTuple):
    """Sequences ``indices`` of a batch, sorted by their tokens. Of each, ``lengths`` tokens are run, of which it has the first
    ``shared`` in common with the one before it."""

    indices: tuple[int, ...]
    shared: tuple[int, ...]
    lengths: tuple[int, ...]

    @property
    def tokens(self) -> int:
        return sum(self.lengths) - sum(self.shared)


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
    planned = list(_plan_rows(ids, groups, prefix, min(LONGEST_ROW, budget or LONGEST_ROW)))
    rows = [row for row in planned if len(row.indices) > 1]
    plain = sum(len(ids[index]) - prefix - 1 for index in groups)
    if not rows or sum(row.tokens for row in planned) > (1 - LEAST_SAVED) * plain:
        return None
    width = max(len(row.indices) for row in rows)
    batches = group_padded({number: row.tokens for number, row in enumerate(rows)}, max(size // width, 1), budget)
    branched = (_build_batch([rows[number] for number in chosen], ids, masks, prefix) for chosen in batches)
    # A sequence that shares its row with none may be of any length, and a mask has the square of it.
    alone = [row.indices[0] for row in planned if len(row.indices) == 1]
    return chain(branched, split_micro_batches(ids, masks, prefix=prefix, size=size, subset=alone, budget=budget))


def can_branch(model: PreTrainedModel) -> bool:
    """True if branches of one row do not see each other, tried on two short sequences with a common beginning.

    In float32, where its weights are, whatever it is trained in: a model that adds the mask to its scores hides other branches
    a little, and bfloat16 would let that pass for rounding."""
    vocabulary = model.get_input_embeddings().weight.shape[0]
    sequences = [np.arange(1, 9) % vocabulary, np.concatenate([np.arange(1, 5), np.arange(12, 20)]) % vocabulary]
    mask = np.arange(12) >= 4
    batch = _build_batch([Row((0, 1), (0, 4), (7, 11))], sequences, [mask[:8], mask], 0).to(model.device)

    def compute(ids: torch.Tensor, **options: object) -> torch.Tensor:
        logits: torch.Tensor = model(input_ids=ids, use_cache=False, **options).logits
        return logits.float()

    with torch.no_grad(), torch.autocast(model.device.type, enabled=False):
        try:
            together = compute(batch.ids, position_ids=batch.positions, attention_mask=batch.visible)
        except (RuntimeError, ValueError, TypeError):  # an attention that takes no such mask
            return False
        alone = torch.cat([compute(torch.from_numpy(each[None, :-1]).to(model.device))[0, 3:] for each in sequences])
        together, seen = (each[batch.rows, batch.columns][batch.repeats] for each in (together, compute(batch.ids)))
    return is_rounding(together, alone, seen, model.dtype)


def _plan_rows(ids: Sequence[NDArray[Any]], groups: Mapping[int, str], prefix: int, longest: int) -> Iterator[Row]:
    members: dict[str, list[int]] = {}
    for index, group in groups.items():
        members.setdefault(group, []).append(index)
    for indices in members.values():
        run = {index: ids[index][prefix:-1] for index in indices}  # the last token of a sequence predicts nothing
        row: list[int] = []
        shared: list[int] = []
        room = longest
        for index in sorted(indices, key=lambda index: run[index].tolist()):
            common = common_prefix_length(run[row[-1]], run[index]) if row else 0
            if row and len(run[index]) - common > room:
                yield Row(tuple(row), tuple(shared), tuple(len(run[each]) for each in row))
                row, shared, common, room = [], [], 0, longest
            row.append(index)
            shared.append(common)
            room -= len(run[index]) - common
        yield Row(tuple(row), tuple(shared), tuple(len(run[each]) for each in row))


def _build_batch(
    rows: Sequence[Row], ids: Sequence[NDArray[Any]], masks: Sequence[NDArray[np.bool_]], prefix: int
) -> MicroBatch:
    width = max(*(row.tokens for row in rows), 1)
    tokens = np.zeros((len(rows), width), np.int64)
    positions = np.zeros_like(tokens)
    visible = np.zeros((len(rows), 1, width, prefix + width), bool)
    visible[..., :prefix] = True
    visible[:, 0, np.arange(width), prefix + np.arange(width)] = True  # padding, too: it has to see something
    sampled: list[NDArray[np.int64]] = []  # row, column and target of each sampled token
    for number, row in enumerate(rows):
        path, at = np.zeros(0, np.int64), 0
        for index, shared, length in zip(row.indices, row.shared, row.lengths, strict=True):
            stop = at + length - shared
            path = np.concatenate([path[:shared], np.arange(at, stop)])
            tokens[number, at:stop] = ids[index][prefix + shared : prefix + length]
            positions[number, at:stop] = prefix + np.arange(shared, length)
            visible[number, 0, at:stop, prefix + path[:shared]] = True
            visible[number, 0, at:stop, prefix + at : prefix + stop] = np.tri(stop - at, dtype=bool)
            sources = np.flatnonzero(masks[index][prefix + 1 :])  # the token that predicts the one after it
            targets = ids[index][prefix + 1 :][sources].astype(np.int64)
            sampled.append(np.stack([np.full(len(sources), number), path[sources], targets], axis=1))
            at = stop
    counts = [len(each) for each in sampled]
    scored, repeats = np.unique(np.concatenate(sampled), axis=0, return_inverse=True)
    most = max(counts)
    return MicroBatch(
        indices=tuple(index for row in rows for index in row.indices),
        ids=torch.from_numpy(tokens),
        rows=torch.from_numpy(scored[:, 0].copy()),
        columns=torch.from_numpy(scored[:, 1].copy()),
        targets=torch.from_numpy(scored[:, 2].copy()),
        places=torch.from_numpy(np.concatenate([place * most + np.arange(count) for place, count in enumerate(counts)])),
        width=most,
        positions=torch.from_numpy(positions),
        visible=torch.from_numpy(visible),
        repeats=torch.from_numpy(repeats.reshape(-1)),
    )
