"""Cutting of a batch into forward passes, padded or packed: the gradient is the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from fleetbus.errors import UserError
from fleetbus_workers.learner.torch import packed_attention
from fleetbus_workers.learner.torch.batches import group_packed, group_padded, split_micro_batches
from fleetbus_workers.learner.torch.packed_attention import NAME
from tests.support.sampled_turns import make_batch, trainer
from tests.support.trainable_model import CONFIGS, compute_distance, compute_gradient, make_model


def test_rows_are_packed_up_to_the_budget_and_every_sequence_comes_once() -> None:
    lengths = dict(enumerate([50, 30, 20, 60, 10, 5, 200]))

    rows = list(group_packed(lengths, 100))

    assert sorted(index for row in rows for index in row) == list(range(7))
    assert all(sum(lengths[index] for index in row) <= 100 for row in rows if 6 not in row)
    assert (6,) in rows, "what exceeds the budget stands alone"
    assert len(rows) == 3


def test_padded_micro_batches_keep_to_size_and_budget_with_padding_counted() -> None:
    lengths = dict(enumerate([10, 50, 11, 12, 49, 48, 300]))

    batches = list(group_padded(lengths, 3, 100))

    assert sorted(index for batch in batches for index in batch) == list(range(7))
    assert all(len(batch) <= 3 for batch in batches)
    assert all(len(batch) * max(lengths[index] for index in batch) <= 100 for batch in batches if 6 not in batch)


def test_without_a_budget_micro_batches_are_full() -> None:
    assert [len(batch) for batch in group_padded(dict.fromkeys(range(10), 7), 4, 0)] == [4, 4, 2]


def test_a_long_sequence_pads_no_short_ones_unless_that_costs_less_than_a_micro_batch() -> None:
    lengths = dict(enumerate([100] * 7 + [900] + [101] * 8))

    batches = list(group_padded(lengths, 16, 0))

    assert sorted(map(len, batches)) == [1, 15]
    assert (7,) in batches


def test_packed_sequences_know_their_own_positions(folder: Path) -> None:
    batch = make_batch(folder, count=4)
    ids, masks = [sequence.ids for sequence in batch], [sequence.loss_mask for sequence in batch]

    for found in split_micro_batches(ids, masks, prefix=0, size=99, budget=120, packing=True):
        assert found.positions is not None and found.ids.shape == found.positions.shape
        assert (found.positions == 0).sum() == len(found.indices)
        rows = found.to_rows(found.targets)
        for row, index in enumerate(found.indices):
            assert rows[row, : masks[index].sum()].tolist() == ids[index][masks[index]].tolist()


@pytest.mark.parametrize("kind", CONFIGS)
def test_packing_and_budgets_do_not_change_the_gradient(tmp_path: Path, kind: str) -> None:
    folder = make_model(tmp_path, kind)
    batch = make_batch(folder)
    plain = compute_gradient(trainer(folder), batch)

    assert compute_distance(compute_gradient(trainer(folder, packing=True, token_budget=150), batch), plain) <= 1e-5
    assert compute_distance(compute_gradient(trainer(folder, token_budget=130), batch), plain) <= 1e-5


@pytest.mark.parametrize("apart", [True, False])
@pytest.mark.parametrize("kind", CONFIGS)
def test_packed_rows_attend_by_sequence_unless_sequences_would_see_each_other(
    tmp_path: Path, kind: str, apart: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model that tells its attention no positions keeps the mask of all pairs."""
    attention = NAME if apart else "sdpa"
    monkeypatch.setattr(packed_attention, "can_pack", lambda model: apart)
    longest = []
    plain = torch.nn.functional.scaled_dot_product_attention
    folder = make_model(tmp_path / "model", kind)
    packing = trainer(folder, packing=True, token_budget=4096)
    batch = make_batch(folder)

    def watch(query: torch.Tensor, *arguments: Any, **options: Any) -> torch.Tensor:
        longest.append(query.shape[2])
        return plain(query, *arguments, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", watch)
    packing.compute_logprobs(batch)

    assert packing._model.config._attn_implementation == attention
    assert (max(longest) < max(len(sequence.ids) for sequence in batch)) == (attention == NAME)
    packing.save_model(tmp_path / "saved")
    assert NAME not in (tmp_path / "saved/config.json").read_text()


def test_packed_rows_keep_to_a_sliding_window(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = CONFIGS["qwen3"].to_dict() | {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0}
    config.pop("layer_types")
    AutoModelForCausalLM.from_config(Qwen3Config(**config)).save_pretrained(tmp_path)
    packing, plain = trainer(tmp_path, packing=True, token_budget=4096), trainer(tmp_path)
    batch = make_batch(tmp_path)

    assert packing._model.config._attn_implementation == NAME and "sliding_attention" in packing._model.config.layer_types
    for ours, theirs in zip(packing.compute_logprobs(batch), plain.compute_logprobs(batch), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)


@pytest.mark.parametrize("reduction", ["sequence_mean", "sequence_sum", "constant_mean"])
def test_packing_keeps_sequences_apart_in_every_reduction(folder: Path, reduction: str) -> None:
    batch = make_batch(folder)
    settings = {"reduction": reduction, "objective": "gspo"}

    plain = compute_gradient(trainer(folder, **settings), batch)

    assert compute_distance(compute_gradient(trainer(folder, **settings, packing=True, token_budget=200), batch), plain) <= 1e-5


def test_packing_without_a_budget_is_refused(folder: Path) -> None:
    with pytest.raises(UserError, match="token_budget"):
        trainer(folder, packing=True)
