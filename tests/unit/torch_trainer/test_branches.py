"""Episodes of a group as one row with branches: the same numbers as one row each, from fewer tokens."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, GPTNeoConfig, LlamaConfig

from fleetbus.config.settings import LearnerSettings, TrainerSettings
from fleetbus_workers.learner.base import TrainingSequence
from fleetbus_workers.learner.torch import branches
from fleetbus_workers.learner.torch.branches import can_branch, split_branched_batches
from fleetbus_workers.learner.torch.settings import TorchTrainerSettings
from fleetbus_workers.learner.torch.trainer import TorchTrainer
from tests.support.trainable_model import VOCABULARY

PREFIX = 20


def build_sequences(lengths: dict[str, list[int]], *, prompt: int = 12, alike: int = 0) -> list[TrainingSequence]:
    """Groups by name, one sequence per length of its answer; all share `PREFIX` tokens, a group ``prompt`` more, and its
    answers ``alike`` tokens more."""
    random = np.random.default_rng(0)
    begin = random.integers(3, VOCABULARY, PREFIX)
    found = []
    for name, answers in lengths.items():
        question = random.integers(3, VOCABULARY, prompt)
        said = random.integers(3, VOCABULARY, alike)
        for number, length in enumerate(answers):
            ids = np.concatenate(
                [begin, question, said[:length], random.integers(3, VOCABULARY, max(length - alike, 0))]
            ).astype(np.int32)
            mask = np.arange(len(ids)) >= PREFIX + prompt
            found.append(
                TrainingSequence(
                    episode_id=f"{name}-{number}",
                    group_id=name,
                    ids=ids,
                    loss_mask=mask,
                    logprobs=np.where(mask, -1.0, 0.0).astype(np.float32),
                    advantages=np.where(mask, random.normal(), 0.0).astype(np.float32),
                    versions=np.where(mask, 0, -1).astype(np.int32),
                )
            )
    return found


def open_trainer(folder: Path, *, branch: bool, size: int = 16) -> TorchTrainer:
    settings = TorchTrainerSettings(
        learner=LearnerSettings(micro_batch_size=size, learning_rate=1e-3), trainer=TrainerSettings()
    )
    trainer = TorchTrainer(folder, settings=settings)
    assert trainer._branch, "this model can be run with branches"
    trainer._branch = branch
    return trainer


@pytest.mark.parametrize("alike", [0, 4])
def test_branches_give_the_log_probabilities_and_gradients_of_whole_sequences(folder: Path, alike: int) -> None:
    batch = build_sequences({"a": [3, 1, 5, 3, 9, 5], "b": [2, 2, 7], "c": [4]}, alike=alike)
    plain, branched = open_trainer(folder, branch=False), open_trainer(folder, branch=True)
    for one, other in zip(plain.compute_logprobs(batch), branched.compute_logprobs(batch), strict=True):
        assert torch.allclose(one, other, atol=1e-5)
    before, after = plain.train(batch, version=0, progress=0.0), branched.train(batch, version=0, progress=0.0)
    assert after["grad_norm"] == pytest.approx(before["grad_norm"], rel=1e-4)
    assert after["loss"] == pytest.approx(before["loss"], abs=1e-6)


def test_sequences_of_several_turns_keep_what_they_were_told_between(folder: Path) -> None:
    batch = build_sequences({"a": [9, 9, 9, 9]})
    turns = [msgspec.structs.replace(each, loss_mask=each.loss_mask & (np.arange(len(each.ids)) % 3 != 0)) for each in batch]
    plain, branched = open_trainer(folder, branch=False), open_trainer(folder, branch=True)
    for one, other in zip(plain.compute_logprobs(turns), branched.compute_logprobs(turns), strict=True):
        assert torch.allclose(one, other, atol=1e-5)


def test_the_prompt_of_a_group_is_run_once() -> None:
    batch = build_sequences({"a": [3] * 8, "b": [3] * 8})
    found = split_branched_batches(
        [each.ids for each in batch],
        [each.loss_mask for each in batch],
        dict(enumerate("a" * 8 + "b" * 8)),
        prefix=PREFIX,
        size=16,
    )
    assert found is not None
    (micro_batch,) = found
    assert micro_batch.ids.shape == (2, 12 + 8 * 2)
    assert sorted(micro_batch.indices) == list(range(16))


def test_what_answers_begin_with_is_run_and_scored_once() -> None:
    batch = build_sequences({"a": [6] * 8}, alike=4)
    ids, masks = [each.ids for each in batch], [each.loss_mask for each in batch]
    found = split_branched_batches(ids, masks, dict.fromkeys(range(8), "a"), prefix=PREFIX, size=16)
    assert found is not None
    (micro_batch,) = found
    assert micro_batch.ids.shape == (1, 12 + 4 + 8 * 1), "of two tokens that are their own the last one predicts nothing"
    assert micro_batch.repeats is not None and len(micro_batch.repeats) == 8 * 6
    assert len(micro_batch.targets) == 4 + 8 * 2
    assert torch.equal(
        micro_batch.targets[micro_batch.repeats],
        torch.cat([torch.from_numpy(ids[index][masks[index]]) for index in micro_batch.indices]).long(),
    )


def test_temperatures_of_a_group_that_differ_are_kept_apart(folder: Path) -> None:
    batch = build_sequences({"a": [5] * 6}, alike=5)
    warm = [msgspec.structs.replace(each, temperature=0.5 + index % 2) for index, each in enumerate(batch)]
    plain, branched = open_trainer(folder, branch=False), open_trainer(folder, branch=True)
    before, after = (trainer.train(warm, version=0, progress=0.0) for trainer in (plain, branched))
    assert after["grad_norm"] == pytest.approx(before["grad_norm"], rel=1e-4)
    assert after["logprob_difference_mean"] == pytest.approx(before["logprob_difference_mean"], rel=1e-4)


def test_a_group_too_long_for_a_row_takes_several(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(branches, "LONGEST_ROW", 24)
    batch = build_sequences({"a": [5] * 7})
    ids, masks = [each.ids for each in batch], [each.loss_mask for each in batch]
    found = split_branched_batches(ids, masks, dict.fromkeys(range(7), "a"), prefix=PREFIX, size=99)
    assert found is not None
    rows = [micro_batch.ids.shape for micro_batch in found]
    assert sum(count for count, _ in rows) == 3 and max(width for _, width in rows) <= 24


def test_groups_of_one_or_of_long_answers_are_left_as_they_are() -> None:
    for lengths in ({"a": [5], "b": [5]}, {"a": [200, 200]}):
        batch = build_sequences(lengths)
        groups = {index: each.group_id for index, each in enumerate(batch)}
        ids, masks = [each.ids for each in batch], [each.loss_mask for each in batch]
        assert split_branched_batches(ids, masks, groups, prefix=PREFIX, size=16) is None


def test_a_model_that_ignores_masks_of_its_caller_is_not_given_branches(folder: Path) -> None:
    model = open_trainer(folder, branch=True)._model
    assert can_branch(model)
    forward = model.forward
    model.forward = lambda *given, attention_mask=None, **options: forward(*given, **options)
    assert not can_branch(model)


def test_the_rounding_of_a_deep_model_in_bfloat16_is_not_taken_for_another_branch() -> None:
    torch.manual_seed(0)
    shape = {"hidden_size": 192, "intermediate_size": 96, "num_hidden_layers": 24, "initializer_range": 0.3}
    heads = {"num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 64}
    config = LlamaConfig(vocab_size=64, **shape, **heads)
    model = AutoModelForCausalLM.from_config(config)
    forward = model.forward
    with torch.autocast("cpu", torch.bfloat16):
        assert can_branch(model)
        model.forward = lambda *given, attention_mask=None, **options: forward(*given, **options)
        assert not can_branch(model)


def test_a_model_that_adds_the_mask_to_its_scores_is_not_given_branches() -> None:
    """It hides other branches, but not quite: what is left is more than rounding."""
    torch.manual_seed(0)
    config = GPTNeoConfig(
        vocab_size=64, hidden_size=64, num_layers=4, num_heads=4, attention_types=[[["global", "local"], 2]], window_size=256
    )
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    assert not can_branch(model)


def test_a_batch_that_is_cut_to_the_prompt_that_all_share_teaches_nothing(folder: Path) -> None:
    settings = TorchTrainerSettings(trainer=TrainerSettings(max_tokens=PREFIX))
    assert (
        TorchTrainer(folder, settings=settings).train(build_sequences({"a": [3, 3]}), version=0, progress=0.0)["grad_norm"] == 0
    )


def test_a_sequence_that_shares_its_row_with_none_is_run_without_a_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be of any length: a mask of 20,000 tokens has 400 million places."""
    monkeypatch.setattr(branches, "LONGEST_ROW", 24)
    batch = build_sequences({"a": [3] * 8, "long": [90]})
    ids, masks = [each.ids for each in batch], [each.loss_mask for each in batch]
    groups = {index: each.group_id for index, each in enumerate(batch)}
    found = split_branched_batches(ids, masks, groups, prefix=0, size=16)
    assert found is None, "the long one outweighs what the others save"
    batch = build_sequences({"a": [3] * 40, "long": [90]})
    ids, masks = [each.ids for each in batch], [each.loss_mask for each in batch]
    found = split_branched_batches(
        ids, masks, {index: each.group_id for index, each in enumerate(batch)}, prefix=PREFIX, size=16
    )
    assert found is not None
    made = list(found)
    assert sorted(index for each in made for index in each.indices) == list(range(41))
    assert all((each.visible is None) == (40 in each.indices) for each in made)
