"""Small models for the embedded engine, episodes played on it, and how far they are from the plain model."""

from __future__ import annotations

import random
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from fleetbus_schemas import SamplingSettings
from fleetbus_workers.inference.base import Generation, GenerationRequest
from fleetbus_workers.inference.torch import TorchSampler
from fleetbus_workers.inference.torch.fused_decoder import FusedRunner
from fleetbus_workers.inference.torch.generic import GenericRunner

VOCABULARY = 64


SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "initializer_range": 0.3,
}


FAMILIES: dict[str, tuple[str, dict[str, Any], type]] = {
    "qwen3": ("qwen3", {"head_dim": 8, "tie_word_embeddings": True}, FusedRunner),
    "qwen2": ("qwen2", {}, FusedRunner),
    "llama": ("llama", {"attention_bias": True}, FusedRunner),
    "llama with long rotations": (
        "llama",
        {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 64}},
        FusedRunner,
    ),
    "llama with other biases": ("llama", {"mlp_bias": True}, GenericRunner),
    "mistral with a window": ("mistral", {"sliding_window": 16}, GenericRunner),
    "gemma3 with both": (
        "gemma3_text",
        {"head_dim": 8, "sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]},
        GenericRunner,
    ),
    "gpt_neox": ("gpt_neox", {}, GenericRunner),
}


def write_model(folder: Path, family: str = "qwen3", seed: int = 0) -> Path:
    kind, options, _ = FAMILIES[family]
    torch.manual_seed(seed)
    config = AutoConfig.for_model(kind, **{**SMALL, **options})
    model = AutoModelForCausalLM.from_config(config)
    for name, tensor in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(tensor, std=0.3)
        elif "norm" in name:
            torch.nn.init.uniform_(tensor, 0.5, 1.5)
    model.save_pretrained(folder)
    return folder


@asynccontextmanager
async def open_engine(folder: Path, **options: Any) -> AsyncIterator[TorchSampler]:
    sampler = TorchSampler(folder, **options)
    with anyio.fail_after(50):
        async with sampler.run():
            yield sampler


def ask(
    ids: list[int], *, seed: int = 0, tokens: int = 8, key: str = "e", stop: frozenset[int] = frozenset(), **how: Any
) -> Any:
    settings = SamplingSettings(**how)
    return GenerationRequest(cache_key=key, ids=ids, sampling=settings, stop_ids=stop, max_tokens=tokens, seed=seed)


def draw_ids(seed: int, count: int) -> list[int]:
    return random.Random(seed).choices(range(VOCABULARY), k=count)


SYSTEM = draw_ids(1000, 70)


async def play(sampler: TorchSampler, episode: int, turns: int = 3) -> list[tuple[list[int], Generation]]:
    """A whole episode of random shape: the history before each turn and what was sampled."""
    shape = random.Random(episode)
    ids = SYSTEM + draw_ids(episode // 2, shape.randint(1, 30))
    played = []
    for turn in range(turns):
        request = ask(ids, seed=100 * episode + turn, tokens=shape.randint(1, 20), key=f"e{episode}")
        generation = await sampler.generate(request)
        played.append((ids, generation))
        ids = ids + generation.ids + draw_ids(100 * episode + turn, shape.randint(1, 25))
    sampler.forget(f"e{episode}")
    return played


async def play_all(sampler: TorchSampler, episodes: int) -> dict[int, list[tuple[list[int], Generation]]]:
    played: dict[int, list[tuple[list[int], Generation]]] = {}

    async def one(episode: int) -> None:
        played[episode] = await play(sampler, episode)

    async with anyio.create_task_group() as tasks:
        for episode in range(episodes):
            tasks.start_soon(one, episode)
    return played


async def wait_sampled(sampler: TorchSampler, tokens: int) -> None:
    while sampler.stats["sampled_tokens"] <= tokens:  # noqa: ASYNC110 - the engine counts in its own thread, and tells nobody
        await anyio.sleep(0.001)


@asynccontextmanager
async def slow_down(sampler: TorchSampler) -> AsyncIterator[None]:
    """At least 5 ms to a token: turns of a thousand tokens outlast whatever the test does meanwhile."""
    step = sampler._runner.step

    def slow(batch: Any) -> torch.Tensor:
        time.sleep(0.005)
        return step(batch)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampler._runner, "step", slow)
        yield


def compute_largest_difference(folder: Path, played: dict[int, list[tuple[list[int], Generation]]]) -> float:
    """Largest difference between sampled log-probabilities and those of transformers' forward call on the whole history."""
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    worst = 0.0
    for ids, generation in [turn for turns in played.values() for turn in turns]:
        with torch.no_grad():
            logprobs = model(torch.tensor([ids + generation.ids])).logits[0, len(ids) - 1 : -1].log_softmax(-1)
        expected = logprobs.gather(1, torch.tensor(generation.ids)[:, None])[:, 0]
        worst = max(worst, float((expected - torch.tensor(generation.logprobs)).abs().max()))
    return worst
