"""Sampler and trainer on a GPU, held against the same on the CPU: tokens, log-probabilities, losses, gradients, what a
checkpoint continues, and what one says of the other's tokens. `just test-gpu`; FLEETBUS_TEST_DEVICE=cpu tries the tests."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from fleetbus.config.settings import AlgorithmSettings, LearnerSettings, TrainerSettings
from fleetbus_schemas import PolicyPublished
from fleetbus_workers.learner.base import TrainingSequence
from fleetbus_workers.learner.torch.settings import TorchTrainerSettings
from fleetbus_workers.learner.torch.trainer import TorchTrainer
from fleetbus_workers.weights.file import read_weights
from tests.support import torch_engine, trainable_model

DEVICE = os.environ.get("FLEETBUS_TEST_DEVICE", "cuda")
COUNT, PREFIX = 12, 24

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.anyio,
    pytest.mark.timeout(120),
    pytest.mark.skipif(DEVICE == "cuda" and not torch.cuda.is_available(), reason="needs a GPU"),
]


def open_trainer(folder: Path, device: str, *, learner: Any = None, algorithm: Any = None, **table: Any) -> TorchTrainer:
    settings = TorchTrainerSettings(
        learner=LearnerSettings(**{"micro_batch_size": 4, "warmup_steps": 0, "learning_rate": 1e-3} | (learner or {})),
        algorithm=AlgorithmSettings(**(algorithm or {})),
        trainer=TrainerSettings(device=device, **table),
    )
    return TorchTrainer(folder, settings=settings)


def make_batch(folder: Path, seed: int = 0) -> list[TrainingSequence]:
    """Two sampled turns each after a common prefix, with the model's own log-probabilities, a little disturbed."""
    draw = np.random.default_rng(seed)
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    prefix, batch = draw.integers(3, trainable_model.VOCABULARY, PREFIX), []
    for index in range(COUNT):
        length = int(draw.integers(20, 40))
        ids = np.concatenate([prefix, draw.integers(3, trainable_model.VOCABULARY, length)]).astype(np.int32)
        mask = np.zeros(len(ids), np.bool_)
        mask[PREFIX + 4 : PREFIX + 9] = mask[PREFIX + 12 :] = True
        logprobs = np.concatenate([[0.0], trainable_model.compute_logprobs(model, ids)]) + 0.1 * draw.normal(size=len(ids))
        made = trainable_model.make_sequence(
            index, ids, mask, logprobs=logprobs, advantage=draw.normal(), group=f"g{index // 4}", version=0
        )
        batch.append(made)
    return batch


def read(trainer: TorchTrainer, file: Path) -> dict[str, torch.Tensor]:
    return dict(read_weights(file, trainer.save_weights(file)))


def assert_near(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], bound: float) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in found.items():
        assert (tensor.float() - wanted[name].float()).abs().max() <= bound, name


@pytest.mark.parametrize("family", torch_engine.FAMILIES)
async def test_the_engine_samples_on_a_gpu_what_it_samples_on_a_cpu(family: str, tmp_path: Path) -> None:
    folder = torch_engine.write_model(tmp_path / "model", family)
    played = {}
    for device in ("cpu", DEVICE):
        async with torch_engine.open_engine(folder, slots=8, device=device) as sampler:
            played[device] = await torch_engine.play_all(sampler, 12)
    alike = compared = 0
    for episode, turns in played["cpu"].items():
        for (ids, first), (also, second) in zip(turns, played[DEVICE][episode], strict=True):
            if ids != also or first.ids != second.ids:
                break  # one number fell between two sums, and the histories differ from here on
            np.testing.assert_allclose(first.logprobs, second.logprobs, atol=2e-4)
            alike += 1
        compared += len(turns)
    assert alike >= 0.9 * compared


async def test_the_engine_in_bfloat16_stays_near_the_model_in_float32(tmp_path: Path) -> None:
    folder = torch_engine.write_model(tmp_path / "model")
    async with torch_engine.open_engine(folder, slots=8, device=DEVICE, dtype=torch.bfloat16) as sampler:
        played = await torch_engine.play_all(sampler, 12)
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    gaps = []
    for turns in played.values():
        for ids, generation in turns:
            whole = np.array([*ids, *generation.ids])
            expected = trainable_model.compute_logprobs(model, whole)[len(ids) - 1 :]
            gaps += list(np.abs(expected - np.array(generation.logprobs)))
    assert float(np.mean(gaps)) < 0.1


TRAINED: dict[str, dict[str, Any]] = {
    "plain": {},
    "packed": {"packing": True, "token_budget": 160},
    "recomputed": {"gradient_checkpointing": True},
    "optimizer on the CPU": {"offload_optimizer": True},
    "adapters": {"lora_rank": 4},
    "a critic": {"learner": {"advantage_estimator": "gae"}},
    "pulled to the start": {"algorithm": {"kl_coefficient": 0.1, "kl_reference": "start"}},
}


@pytest.mark.parametrize("kind", ["qwen3", "llama", "moe", "gpt2"])
def test_gradients_on_a_gpu_are_those_on_a_cpu(kind: str, tmp_path: Path) -> None:
    folder = trainable_model.make_model(tmp_path / "model", kind)
    batch = make_batch(folder)
    first, second = (trainable_model.compute_gradient(open_trainer(folder, device), batch) for device in ("cpu", DEVICE))
    assert trainable_model.compute_distance({name: tensor.cpu() for name, tensor in second.items()}, first) <= 1e-4


@pytest.mark.parametrize("options", TRAINED.values(), ids=TRAINED)
def test_three_steps_on_a_gpu_end_where_a_checkpoint_of_two_and_another_step_do(
    options: dict[str, Any], tmp_path: Path
) -> None:
    """The optimizer's counts and moments are read back to where its fused kernel wants them."""
    if "lora_rank" in options:
        pytest.importorskip("peft")
    folder = trainable_model.make_model(tmp_path / "model")
    batches = [make_batch(folder, seed) for seed in range(3)]
    whole = open_trainer(folder, DEVICE, **options)
    for batch in batches[:2]:
        whole.train(batch, version=0, progress=0.0)
    (tmp_path / "checkpoint").mkdir()
    whole.start_checkpoint(tmp_path / "checkpoint")()
    resumed = open_trainer(folder, DEVICE, **options)
    resumed.restore(tmp_path / "checkpoint")
    for trainer in (whole, resumed):
        found = trainer.train(batches[2], version=0, progress=0.0)
        assert found["skipped_updates"] == 0 and np.isfinite(found["loss"])
    assert_near(read(resumed, tmp_path / "resumed"), read(whole, tmp_path / "whole"), 1e-5)
    on_cpu = open_trainer(folder, "cpu", **options)
    for batch in batches:
        on_cpu.train(batch, version=0, progress=0.0)
    if "lora_rank" not in options:  # whose first numbers are drawn on the device
        assert_near(read(whole, tmp_path / "whole"), read(on_cpu, tmp_path / "cpu"), 2e-3)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
async def test_the_trainer_gives_tokens_the_log_probabilities_that_they_were_sampled_with(
    precision: str, tmp_path: Path
) -> None:
    folder = trainable_model.make_model(tmp_path / "model")
    trainer = open_trainer(folder, DEVICE, precision=precision)
    trainer.train(make_batch(folder), version=0, progress=0.0)
    manifest = trainer.save_weights(tmp_path / "weights")
    policy = PolicyPublished(
        policy="default", version=1, lineage="l1", step=1, uri=(tmp_path / "weights").as_uri(), manifest=manifest,
        size_bytes=(tmp_path / "weights").stat().st_size,
    )  # fmt: skip
    async with torch_engine.open_engine(folder, slots=8, device=DEVICE) as sampler:
        await sampler.load(policy)
        assert sampler.version == 1
        played = await torch_engine.play_all(sampler, 8)
    batch, sampled = [], []
    for episode, turns in played.items():
        ids, generation = turns[-1]
        mask = np.array([False] * len(ids) + [True] * len(generation.ids))
        logprobs = np.concatenate([np.zeros(len(ids)), generation.logprobs])
        whole = np.array([*ids, *generation.ids], np.int32)
        batch.append(trainable_model.make_sequence(episode, whole, mask, logprobs=logprobs, advantage=1.0))
        sampled.append(np.array(generation.logprobs))
    computed = trainer.compute_logprobs(batch)
    gaps = np.concatenate([np.abs(one.cpu().numpy() - other) for one, other in zip(computed, sampled, strict=True)])
    assert float(gaps.mean()) <= (1e-4 if precision == "float32" else 0.1)
