"""Options of the torch trainer beyond the plain step: packing, budgets, cuts, adapters, recomputing, lower precision, KL."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from fleetbus.config.settings import AlgorithmSettings, Configuration, TrainerSettings
from fleetbus.core.algorithms.corrections import kl_k1, kl_penalty
from fleetbus_workers.assembly.trainers import build_trainer_settings, choose_precision
from fleetbus_workers.learner.torch.batches import truncate_sequence
from fleetbus_workers.learner.torch.optimizer import compute_learning_rate
from fleetbus_workers.learner.torch.settings import TorchTrainerSettings
from fleetbus_workers.weights.delta import write_smaller
from fleetbus_workers.weights.file import read_weights
from tests.support.checkpoints import store
from tests.support.sampled_turns import PROMPT, make_batch, trainer
from tests.support.trainable_model import compute_distance, compute_gradient
from tests.support.trainer_settings import trainer_settings


def test_a_sequence_is_cut_at_its_end_and_what_is_left_is_trained_as_it_was(folder: Path) -> None:
    batch = make_batch(folder, count=1)
    short = truncate_sequence(batch[0], 30)

    assert len(short.ids) == len(short.loss_mask) == len(short.advantages) == 30
    assert (short.ids == batch[0].ids[:30]).all() and short.loss_mask[:PROMPT].sum() == 0
    assert truncate_sequence(batch[0], 0) is truncate_sequence(batch[0], 1000) is batch[0]
    metrics = trainer(folder, max_tokens=30).train(batch, version=3, progress=0.0)
    assert metrics["tokens"] == 30 - PROMPT
    assert metrics["tokens_cut"] == len(batch[0].ids) - 30
    cut_first = compute_gradient(trainer(folder), [short])
    assert compute_distance(compute_gradient(trainer(folder, max_tokens=30), batch), cut_first) <= 1e-6


def test_a_cut_into_the_prompt_leaves_nothing_to_train_and_does_no_harm(folder: Path) -> None:
    metrics = trainer(folder, max_tokens=10).train(make_batch(folder, count=2), version=3, progress=0.0)

    assert metrics["tokens"] == 0.0 and math.isfinite(metrics["loss"])


def test_every_minibatch_of_every_epoch_is_an_optimizer_step(folder: Path) -> None:
    trained = trainer(folder, minibatches=3, epochs=2)

    trained.train(make_batch(folder), version=3, progress=0.0)

    assert trained._updates == 6


# Precision and memory


def test_an_optimizer_on_the_cpu_makes_the_same_weights_and_reads_the_others_checkpoint(folder: Path, tmp_path: Path) -> None:
    batch = make_batch(folder)
    plain, offloaded = trainer(folder, minibatches=2), trainer(folder, minibatches=2, offload_optimizer=True)
    for each in (plain, offloaded):
        each.train(batch, version=3, progress=0.0)
    plain.start_checkpoint(tmp_path)()
    resumed = trainer(folder, minibatches=2, offload_optimizer=True)
    resumed.restore(tmp_path)
    for each in (plain, offloaded, resumed):
        each.train(batch, version=3, progress=0.5)

    expected = dict(plain._model.named_parameters())
    for each in (offloaded, resumed):
        for name, parameter in each._model.named_parameters():
            torch.testing.assert_close(parameter, expected[name], atol=1e-6, rtol=1e-5)
    start = dict(trainer(folder)._model.named_parameters())
    assert any(not torch.equal(parameter, start[name]) for name, parameter in expected.items())


def test_recomputed_activations_give_the_same_gradient(folder: Path) -> None:
    batch = make_batch(folder)

    assert (
        compute_distance(
            compute_gradient(trainer(folder, gradient_checkpointing=True), batch), compute_gradient(trainer(folder), batch)
        )
        <= 1e-5
    )


def test_bfloat16_computes_roughly_the_same_gradient_and_keeps_weights_in_float32(folder: Path) -> None:
    batch = make_batch(folder)
    lower = trainer(folder, precision="bfloat16")

    found = compute_distance(compute_gradient(lower, batch), compute_gradient(trainer(folder), batch))

    assert 1e-5 < found < 0.1
    assert all(parameter.dtype == torch.float32 for parameter in lower._model.parameters())


def test_a_shared_prefix_is_computed_in_the_same_precision_as_what_follows_it(folder: Path) -> None:
    batch = make_batch(folder, shared=True)
    lower = trainer(folder, precision="bfloat16")
    assert lower._share

    assert 1e-5 < compute_distance(compute_gradient(lower, batch), compute_gradient(trainer(folder), batch)) < 0.1


@pytest.mark.parametrize(
    ("lr_scheduler_type", "rates"), [("cosine", [1.0, 0.6, 0.2]), ("constant", [1.0] * 3), ("linear", [1.0, 0.6, 0.2])]
)
def test_the_learning_rate_follows_the_schedule(lr_scheduler_type: str, rates: list[float]) -> None:
    settings = trainer_settings(lr_scheduler_type=lr_scheduler_type, learning_rate=1.0, min_lr_ratio=0.2, warmup_steps=0)

    assert [compute_learning_rate(settings, progress, 0) for progress in (0.0, 0.5, 1.0)] == pytest.approx(rates)


def test_weights_published_in_bfloat16_are_rounded_and_a_checkpoint_is_not(folder: Path, tmp_path: Path) -> None:
    batch = make_batch(folder)
    settings = {"published_dtype": "bfloat16", "warmup_steps": 0}
    straight = trainer(folder, **settings)
    straight.train(batch, version=0, progress=0.0)
    manifest = straight.save_weights(tmp_path / "weights")
    store(straight, tmp_path / "state")

    read = read_weights(tmp_path / "weights", manifest)
    own = straight._model.state_dict()
    assert {entry.dtype for entry in manifest} == {"BF16"}
    assert "lm_head.weight" not in read, "tied weights travel once"
    assert all(torch.equal(tensor, own[name].to(torch.bfloat16)) for name, tensor in read.items())
    resumed = trainer(folder, **settings)
    resumed.restore(tmp_path / "state")
    assert all(torch.equal(tensor, own[name]) for name, tensor in resumed._model.state_dict().items())


def test_a_small_step_changes_few_numbers_in_bfloat16(folder: Path, tmp_path: Path) -> None:
    """What makes differences between versions worth publishing."""
    slow = trainer(folder, published_dtype="bfloat16", learning_rate=1e-5, warmup_steps=0)
    slow.save_weights(tmp_path / "v0.safetensors")
    slow.train(make_batch(folder), version=0, progress=0.0)
    slow.save_weights(tmp_path / "v1.safetensors")

    delta = write_smaller(tmp_path / "v1.safetensors", base=tmp_path / "v0.safetensors", base_uri="v0")

    assert delta.suffix == ".delta"
    assert delta.stat().st_size < 0.5 * (tmp_path / "v1.safetensors").stat().st_size


# KL to the start, KL in the reward


def test_the_kl_to_the_start_is_zero_at_the_start_and_pulls_back_later(folder: Path) -> None:
    batch = make_batch(folder, off_policy=0.0)
    still = [msgspec.structs.replace(sequence, advantages=np.zeros_like(sequence.advantages)) for sequence in batch]
    pulled = trainer(folder, kl_coefficient=1.0, kl_reference="start", kl_estimator="k2", learning_rate=1e-2, warmup_steps=0)

    assert pulled.train(still, version=3, progress=0.0)["grad_norm"] == pytest.approx(0.0, abs=1e-6)
    pulled.train(batch, version=3, progress=0.0)
    away = pulled.train(still, version=4, progress=0.0)
    back = pulled.train(still, version=4, progress=0.0)

    assert away["loss"] > back["loss"] > 0


def test_a_kl_in_the_reward_changes_the_advantages_and_not_the_loss(folder: Path) -> None:
    batch = make_batch(folder, count=3, off_policy=0.4)
    rewarded = trainer(folder, kl_coefficient=0.3, kl_place="reward", kl_estimator="k1")
    policy = [logprobs.numpy() for logprobs in rewarded._compute_logprobs(batch, rewarded._model)]
    width = max(map(len, policy))
    rows = np.zeros((2, 3, width))
    for row, (found, sequence) in enumerate(zip(policy, batch, strict=True)):
        rows[0, row, : len(found)], rows[1, row, : len(found)] = found, sequence.logprobs[sequence.loss_mask]
    mask = np.stack([np.arange(width) < len(found) for found in policy]).astype(float)
    penalty = 0.3 * kl_penalty(kl_k1(*rows), mask)
    by_hand = []
    for row, sequence in enumerate(batch):
        advantages = sequence.advantages.copy()
        advantages[sequence.loss_mask] += penalty[row, : len(policy[row])].astype(np.float32)
        by_hand.append(msgspec.structs.replace(sequence, advantages=advantages))

    assert compute_distance(compute_gradient(rewarded, batch), compute_gradient(trainer(folder), by_hand)) <= 1e-5


@pytest.mark.parametrize(
    "choice",
    [
        {"objective": "dppo_tv", "clip_ratio_low": 0.2, "clip_ratio_high": 0.2, "kl_coefficient": 2e-3, "kl_estimator": "k2"},
        {"rollout_correction": "geometric", "rollout_correction_low": 0.9, "rollout_correction_high": 1.1},
        {"rollout_correction": "mis_sequence", "reduction": "sequence_sum"},
        {"rollout_correction": "decoupled", "minibatches": 2, "kl_coefficient": 0.1, "kl_reference": "start"},
        {"old_policy": "trainer", "epochs": 2, "packing": True, "token_budget": 128},
    ],
)
def test_every_further_algorithm_trains_with_finite_metrics(folder: Path, choice: dict[str, Any]) -> None:
    metrics = trainer(folder, **choice).train(make_batch(folder), version=3, progress=0.0)

    assert all(math.isfinite(value) for value in metrics.values())
    assert metrics["grad_norm"] > 0


def test_the_configuration_reaches_the_trainer() -> None:
    configuration = Configuration(
        algorithm=AlgorithmSettings(objective="cispo", kl_coefficient=0.5, kl_reference="start", credit_assignment="turn"),
        trainer=TrainerSettings(packing=True, token_budget=4096, epochs=2, lora_rank=4, device="auto"),
    )

    settings = build_trainer_settings(configuration)

    algorithm, given = settings.algorithm, settings.trainer
    assert (algorithm.objective, algorithm.kl_coefficient, algorithm.kl_reference) == ("cispo", 0.5, "start")
    assert (given.packing, given.token_budget, given.epochs, given.lora_rank) == (True, 4096, 2, 4)
    assert build_trainer_settings(Configuration()) == TorchTrainerSettings()


# Adapters


def test_differences_are_told_by_episode_and_a_slope_over_all_tokens(folder: Path) -> None:
    batch = make_batch(folder)
    batch[2] = msgspec.structs.replace(batch[2], versions=np.where(batch[2].loss_mask, 2, -1).astype("i4"))
    fresh = [batch[0], batch[1], *batch[3:]]
    trained = trainer(folder)
    known = [each.numpy() for each in trained.compute_logprobs(fresh)]

    metrics = trained.train(batch, version=3, progress=0.0)

    sampled = [each.logprobs[each.loss_mask] for each in fresh]
    apart = {each.episode_id: np.abs(x - y).mean() for each, x, y in zip(fresh, known, sampled, strict=True)}
    assert trained.differences == pytest.approx(apart, abs=1e-5)
    slope = np.polyfit(np.concatenate(known), np.concatenate(sampled), 1)[0]
    assert metrics["logprob_slope"] == pytest.approx(slope, rel=1e-3)


@pytest.mark.parametrize(
    ("device", "has_gpu", "has_it", "chosen"),
    [
        ("cpu", False, True, "bfloat16"),
        ("cpu", True, False, "float32"),
        ("auto", False, False, "float32"),
        ("auto", True, False, "bfloat16"),
        ("cuda", True, False, "bfloat16"),
    ],
)
def test_precision_auto_is_bfloat16_where_the_device_multiplies_in_it_as_the_sampler_s_is(
    device: str, has_gpu: bool, has_it: bool, chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fleetbus_workers.assembly.trainers.multiplies_bfloat16", lambda: has_it)
    monkeypatch.setattr("torch.cuda.is_available", lambda: has_gpu)
    configuration = Configuration(trainer=TrainerSettings(precision="auto", device=device))
    assert choose_precision(configuration).trainer.precision == chosen
    assert build_trainer_settings(configuration).trainer.precision == chosen
