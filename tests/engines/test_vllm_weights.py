"""Versions of the weights in a real vLLM engine: adapters under load, experts, keys and values that are kept; and
arguments that are passed on. `just test-vllm`; the figures that it prints are those of docs/engines.md."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest

from fleetbus.config.settings import Configuration, InferenceSettings, RunSettings
from fleetbus.errors import UserError
from fleetbus_schemas import PolicyPublished
from fleetbus_workers.assembly.engines import launch_engine
from fleetbus_workers.inference.base import Generation, GenerationRequest
from fleetbus_workers.inference.vllm.engine import EngineSettings, start_engine
from fleetbus_workers.inference.vllm.load_recorder import LoadRecorder
from fleetbus_workers.weights.adapters import DOWN, PREFIX, UP, read_version
from fleetbus_workers.weights.file import WeightsRejected
from tests.support import vllm_engine
from tests.support.vllm_engine import (
    CLOSE,
    LENGTH,
    MARKS,
    STARTER,
    generate_all,
    move_weights,
    open_sampler,
    publish,
    until_sampled,
)

pytestmark = MARKS

RANK = 4

build_request = partial(vllm_engine.build_request, length=40, stops=frozenset())


def draw_adapters(version: int) -> dict[str, Any]:
    """Random adapters beside all linear layers of the starter policy."""
    import torch
    from safetensors.torch import load_file

    generator = torch.Generator().manual_seed(version)
    tensors = {}
    for name, weight in load_file(STARTER / "model.safetensors").items():
        if name.endswith("_proj.weight"):
            module = PREFIX + name.removesuffix(".weight")
            tensors[module + DOWN] = 0.1 * torch.randn(RANK, weight.shape[1], generator=generator)
            tensors[module + UP] = 0.1 * torch.randn(weight.shape[0], RANK, generator=generator)
    return tensors


def load_model(folder: Path, policy: PolicyPublished | None) -> Any:
    """What transformers computes with a version's weights."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    if policy is not None:
        from fleetbus_workers.weights.names import convert_to_memory, has_other_names

        tensors = read_version(policy, folder)
        if has_other_names(model):
            tensors = convert_to_memory(model, tensors)
        assert not model.load_state_dict(tensors, strict=False).unexpected_keys
    return model


def measure_difference(model: Any, request: GenerationRequest, generation: Generation, start: int = 0) -> float:
    """The largest, over sampled tokens from ``start``, between the engine's log-probabilities and one forward pass."""
    import torch

    with torch.no_grad():
        logits = model(torch.tensor([[*request.ids, *generation.ids]])).logits[0]
    values = (logits / (request.sampling.temperature or 1.0)).log_softmax(-1)
    offset = len(request.ids) - 1
    pairs = enumerate(zip(generation.ids, generation.logprobs, strict=True))
    return max(abs(float(values[offset + place, token]) - known) for place, (token, known) in pairs if place >= start)


async def generate_across(sampler: Any, requests: list[GenerationRequest], swap: Callable[[], Any]) -> list[Generation]:
    """Turns that run while ``swap`` loads a version."""
    found: list[Generation] = []
    before = sampler.stats["sampled_tokens"]

    async def generate() -> None:
        found.extend(await generate_all(sampler, requests))

    async with anyio.create_task_group() as group:
        group.start_soon(generate)
        await until_sampled(sampler, before)
        await swap()
    return found


@pytest.fixture(scope="module")
async def plain(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Any]:
    """Opened as an inference worker opens it."""
    options = '{"max_num_batched_tokens": 2048, "seed": 7, "max_logprobs": 3}'
    settings = InferenceSettings(engine="vllm", max_num_seqs=16, max_model_len=LENGTH, kv_cache_mib=64, vllm=options)
    run = RunSettings(folder=str(tmp_path_factory.mktemp("runs")), model=str(STARTER))
    async with launch_engine(Configuration(run=run, inference=settings), "inference-1") as (sampler, _), sampler.run():
        yield sampler


async def test_arguments_of_vllm_are_passed_on_and_outweigh_those_of_fleetbus(plain: Any) -> None:
    config = plain._engine.vllm_config
    found = (config.scheduler_config.max_num_batched_tokens, config.model_config.seed, config.model_config.max_logprobs)
    assert found == (2048, 7, 3)
    request = build_request(1)
    generation = await plain.generate(request)
    difference = measure_difference(load_model(STARTER, None), request, generation)
    print(f"arguments passed on: log-probabilities differ by up to {difference:.2g}")
    assert difference < CLOSE


def test_an_argument_that_vllm_does_not_have_is_refused_by_name() -> None:
    with pytest.raises(UserError, match="tensor_paralell_size"):
        start_engine(EngineSettings(folder=STARTER, options={"tensor_paralell_size": 2}), LoadRecorder())


@pytest.mark.parametrize("spread", [0.02, 0.002, 0.0002])
@pytest.mark.parametrize("keeps", [False, True], ids=["flush", "keep"])
async def test_a_turn_that_meets_new_weights_goes_on_from_keys_and_values_that_are_computed_again_or_kept(
    plain: Any, tmp_path: Path, keeps: bool, spread: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Log-probabilities after the swap beside those of the new weights over the whole sequence, as a trainer computes them.
    The version before is the starter policy, the next one all its weights moved by noise of ``spread``."""
    await plain.load(publish(tmp_path, plain.version + 1, move_weights(0, 0.0)))
    monkeypatch.setattr(plain, "_settings", msgspec.structs.replace(plain._settings, keeps_cache=keeps))
    old = plain.version
    policy = publish(tmp_path, old + 1, move_weights(old + 1, spread))
    request = build_request(3, length=100, tokens=400)

    [generation] = await generate_across(plain, [request], lambda: plain.load(policy))

    assert [span.version for span in generation.versions] == [old, old + 1]
    difference = measure_difference(load_model(STARTER, policy), request, generation, generation.versions[1].start)
    after = build_request(4)
    fresh = measure_difference(load_model(STARTER, policy), after, await plain.generate(after))
    kind = "kept" if keeps else "flushed"
    print(f"weights moved by {spread}, keys and values {kind}: log-probabilities differ by {difference:.2g}, then {fresh:.2g}")
    assert (difference > 10 * fresh) == keeps and fresh < CLOSE


async def test_adapters_are_swapped_under_load_and_every_turn_is_of_the_version_that_it_began_with(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    place = tmp_path_factory.mktemp("adapters")
    policies = [publish(place, version, draw_adapters(version)) for version in range(1, 5)]
    models = {policy.version: load_model(STARTER, policy) for policy in policies}
    models[0] = load_model(STARTER, None)
    differences, seen = [], set()
    async with open_sampler(STARTER, place / "served", lora_rank=RANK) as sampler:
        for turn, policy in enumerate(policies):
            requests = [build_request(10 * turn + seed, tokens=200) for seed in range(8)]
            generations = await generate_across(sampler, requests, partial(sampler.load, policy))
            for request, generation in zip(requests, generations, strict=True):
                [span] = generation.versions
                assert (span.start, span.stop) == (0, len(generation.ids))
                differences.append(measure_difference(models[span.version], request, generation))
                seen.add(span.version)
        last = build_request(99, temperature=0.0)
        differences.append(measure_difference(models[4], last, await sampler.generate(last)))
        assert sampler.stats["engine_restarts"] == 0
        assert {each.name for each in (place / "served").iterdir()} <= {"base", "v000004", "v000003"}
        whole = publish(place, 5, move_weights(5))
        with pytest.raises(WeightsRejected, match="holds a whole model, and this engine was started for adapters"):
            await sampler.load(whole)
        with pytest.raises(WeightsRejected, match="is no part of an adapter"):
            await sampler.load(publish(place, 6, {f"{PREFIX}nowhere{DOWN}": tensor for tensor in draw_adapters(6).values()}))
        generation = await sampler.generate(last)
        assert [span.version for span in generation.versions] == [4] and sampler.version == 4
    print(f"adapters of {policies[0].size_bytes / 1e6:.2f} MB, the model {whole.size_bytes / 1e6:.2f} MB, swapped under load:")
    print(f"{len(differences)} turns of versions {sorted(seen)}; log-probabilities differ by up to {max(differences):.2g}")
    assert seen >= {0, 1, 2, 3} and max(differences) < CLOSE


def make_experts(folder: Path, seed: int) -> Any:
    """A tiny Qwen3-MoE with random weights."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig

    torch.manual_seed(seed)
    config = Qwen3MoeConfig(
        vocab_size=512, hidden_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
        intermediate_size=256, moe_intermediate_size=64, num_experts=8, num_experts_per_tok=2, max_position_embeddings=1024,
        pad_token_id=0, eos_token_id=2, bos_token_id=None, tie_word_embeddings=False,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return model


async def test_versions_of_a_mixture_of_experts_are_loaded_under_the_names_of_the_models_files(tmp_path: Path) -> None:
    """The trainer publishes those names (tests/system/test_sharded_training.py), whatever transformers calls them in memory."""
    from safetensors.torch import load_file

    models = {version: make_experts(tmp_path / f"model{version}", version) for version in range(3)}
    differences = []
    for file in STARTER.glob("tokenizer*.json"):
        (tmp_path / "model0" / file.name).write_bytes(file.read_bytes())
    async with open_sampler(tmp_path / "model0", tmp_path / "served") as sampler:
        for version, model in models.items():
            if version:
                tensors = load_file(tmp_path / f"model{version}" / "model.safetensors")
                assert any(".experts.0." in name for name in tensors)
                await sampler.load(publish(tmp_path, version, tensors))
            request = build_request(version)
            generation = await sampler.generate(request)
            assert [span.version for span in generation.versions] == [version]
            differences.append(measure_difference(model, request, generation))
    print(f"a mixture of experts, versions 0, 1, 2: log-probabilities differ by up to {max(differences):.2g}")
    assert max(differences) < CLOSE
