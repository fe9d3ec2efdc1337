"""Versions that are adapters alone: published small, taken by engines as the merged model, refused where they do not fit."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from fleetbus.config.check import check_configuration
from fleetbus.config.engine_arguments import count_engine_gpus, parse_engine_arguments
from fleetbus.config.load import load_configuration
from fleetbus.errors import UserError
from fleetbus_schemas import PolicyPublished, SamplingSettings
from fleetbus_workers.inference.base import GenerationRequest
from fleetbus_workers.inference.torch import TorchSampler
from fleetbus_workers.inference.weight_folders import WeightFolders
from fleetbus_workers.learner.torch.trainer import TorchTrainer
from fleetbus_workers.weights.adapters import CONFIGURATION, DOWN, UP, WEIGHTS_NAME, read_version
from fleetbus_workers.weights.file import WeightsRejected, write_weights
from tests.support.backends import asyncio_alone
from tests.support.trainable_model import make_model, make_sequence
from tests.support.trainer_settings import trainer_settings

anyio_backend = asyncio_alone


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


def train(folder: Path, published: str) -> TorchTrainer:
    pytest.importorskip("peft")
    trainer = TorchTrainer(
        folder,
        settings=trainer_settings(
            lora_rank=2, lora_alpha=6.0, published_weights=published, learning_rate=1e-2, warmup_steps=0, micro_batch_size=4
        ),
    )
    ids, mask = np.arange(3, 43).astype(np.int32), np.arange(40) >= 20
    batch = [make_sequence(index, ids, mask, logprobs=np.full(40, -4.0), advantage=1.0 - 2 * index) for index in range(2)]
    for _ in range(3):
        trainer.train(batch, version=3, progress=0.0)
    return trainer


def announce(file: Path, manifest: Any, version: int = 1) -> PolicyPublished:
    return PolicyPublished(
        policy="default", version=version, lineage="l", step=1, uri=file.as_uri(), manifest=manifest, size_bytes=1
    )


def test_adapters_alone_are_small_and_merge_to_what_is_published_merged(folder: Path, tmp_path: Path) -> None:
    small, whole = tmp_path / "small", tmp_path / "whole"
    manifest = train(folder, "adapters").save_weights(small)
    train(folder, "merged").save_weights(whole)

    assert all(entry.name.endswith((DOWN, UP)) for entry in manifest)
    assert small.stat().st_size < 0.5 * whole.stat().st_size
    merged, expected, base = (
        read_version(announce(small, manifest), folder),
        load_file(whole),
        load_file(folder / "model.safetensors"),
    )
    assert set(merged) == set(expected)
    changed = [name for name in expected if not torch.equal(merged[name], base[name])]
    assert changed and all(name.endswith("_proj.weight") for name in changed)
    for name, tensor in expected.items():
        torch.testing.assert_close(merged[name], tensor, atol=1e-6, rtol=1e-5)


@pytest.mark.anyio
async def test_the_torch_engine_samples_with_adapters_what_it_samples_with_the_merged_model(
    folder: Path, tmp_path: Path
) -> None:
    request = GenerationRequest(
        cache_key="e", ids=list(range(3, 23)), sampling=SamplingSettings(), stop_ids=frozenset(), max_tokens=12, seed=1
    )
    found = []
    for kind in ("merged", "adapters"):
        manifest = train(folder, kind).save_weights(tmp_path / kind)
        sampler = TorchSampler(folder, slots=2, max_model_len=64)
        async with sampler.run():
            await sampler.load(announce(tmp_path / kind, manifest, version=7))
            found.append(await sampler.generate(request))
    assert found[0].ids == found[1].ids and [span.version for span in found[1].versions] == [7]
    assert found[0].logprobs == pytest.approx(found[1].logprobs, abs=1e-5)


def test_vllm_is_given_a_folder_as_peft_has_it(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "adapters"
    manifest = train(folder, "adapters").save_weights(file)
    served = WeightFolders(folder, tmp_path / "served").prepare(announce(file, manifest))
    configuration = json.loads((served / CONFIGURATION).read_text())
    assert (configuration["r"], configuration["lora_alpha"]) == (2, 2), "the scale is in the tensors"
    assert set(configuration["target_modules"]) == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    assert load_file(served / WEIGHTS_NAME).keys() == {entry.name for entry in manifest}


def lose_one(tensors: dict[str, Any]) -> None:
    del tensors[max(tensors)]


def rename_one(tensors: dict[str, Any]) -> None:
    name = max(tensors)
    tensors[name.replace("layers.1", "layers.9")] = tensors.pop(name)


def cut_one(tensors: dict[str, Any]) -> None:
    name = max(tensors)
    tensors[name] = tensors[name][:-1].clone()


@pytest.mark.parametrize("spoil", [lose_one, rename_one, cut_one])
def test_adapters_that_do_not_fit_the_model_are_rejected_by_name(
    folder: Path, tmp_path: Path, spoil: Callable[[dict[str, Any]], None]
) -> None:
    file = tmp_path / "adapters"
    train(folder, "adapters").save_weights(file)
    tensors = load_file(file)
    spoil(tensors)
    policy = announce(file, write_weights(file, tensors))
    for take in (WeightFolders(folder, tmp_path / "served").prepare, lambda policy: read_version(policy, folder)):
        with pytest.raises(WeightsRejected, match=r"layers\.\d"):
            take(policy)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ('[trainer]\npublished_weights = "adapters"', "set trainer.lora_rank"),
        (
            '[trainer]\npublished_weights = "adapters"\nlora_rank = 4\n[inference]\nengine = "openai"\nurls = "http://h"',
            "engines torch and vllm take them",
        ),
        ("[inference.vllm]\nmax_model_len = 4096", "set that"),
        ("[inference.vllm]\nlogprobs_mode = 'raw_logprobs'", "is fixed"),
        ("[inference.vllm]\ntensor_parallel_size = 0", "no whole number"),
        ("[inference]\nvllm = 'tensor_parallel_size=2'", "write a JSON object"),
        ("[inference]\nengine = 'openai'\nurls = 'http://h'\nvllm = '{\"seed\": 2}'", "arguments of engine vllm"),
    ],
)
def test_settings_that_no_engine_could_follow_are_refused(tmp_path: Path, content: str, reason: str) -> None:
    (tmp_path / "fleetbus.toml").write_text(content)
    with pytest.raises(UserError, match=reason):
        check_configuration(load_configuration(file=tmp_path / "fleetbus.toml", variables={}).configuration)


def test_arguments_of_vllm_are_a_table_of_a_file_or_json_in_a_flag(tmp_path: Path) -> None:
    (tmp_path / "fleetbus.toml").write_text("[inference.vllm]\ntensor_parallel_size = 2\nenable_expert_parallel = true")
    read = load_configuration(file=tmp_path / "fleetbus.toml", variables={}).configuration
    given = load_configuration(variables={"FLEETBUS_INFERENCE_VLLM": '{"tensor_parallel_size": 2, "data_parallel_size": 2}'})
    assert parse_engine_arguments(read.inference.vllm) == {"tensor_parallel_size": 2, "enable_expert_parallel": True}
    assert (count_engine_gpus(read.inference.vllm), count_engine_gpus(given.configuration.inference.vllm)) == (2, 4)
    assert count_engine_gpus("") == 1
