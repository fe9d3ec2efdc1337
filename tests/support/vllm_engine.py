"""The base of the tests of vLLM: their marks, the starter policy and versions of it, requests, engines."""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest

from fleetbus_schemas import PolicyPublished, SamplingSettings
from fleetbus_workers.inference.base import Generation, GenerationRequest
from fleetbus_workers.inference.vllm.engine import EngineSettings

MARKS = [
    pytest.mark.vllm,
    pytest.mark.timeout(1500),
    pytest.mark.filterwarnings("default"),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vllm: just test-vllm"),
]
STARTER = Path(__file__).parents[2] / "workers/fleetbus_workers/starter/policy"
LENGTH = 512
CLOSE = 1e-4
LIMIT_SECONDS = 1200

_numbers = itertools.count()


@asynccontextmanager
async def open_sampler(
    folder: Path, place: Path, *, processor: Any = None, slots: int = 16, **settings: Any
) -> AsyncIterator[Any]:
    """A running `VllmSampler`. Starting one takes half a minute of a core."""
    from fleetbus_workers.inference.vllm import VllmSampler

    engine = EngineSettings(folder=folder, slots=slots, max_model_len=LENGTH, kv_cache_mib=64, **settings)
    sampler = await anyio.to_thread.run_sync(lambda: VllmSampler(engine, place=place, processor=processor))
    async with sampler.run():
        yield sampler


async def until_sampled(sampler: Any, before: float) -> None:
    """Wait for a token beyond the ``before`` that `VllmSampler.stats` counted: vLLM tells of no token but in its figures."""
    with anyio.fail_after(LIMIT_SECONDS):
        while sampler.stats["sampled_tokens"] <= before:  # noqa: ASYNC110
            await anyio.sleep(0.005)


def move_weights(seed: int, spread: float = 0.02) -> dict[str, Any]:
    """The starter policy's, moved by noise."""
    import torch
    from safetensors.torch import load_file

    generator = torch.Generator().manual_seed(seed)
    tensors = load_file(STARTER / "model.safetensors")
    return {name: tensor + spread * torch.randn(tensor.shape, generator=generator) for name, tensor in tensors.items()}


def publish(place: Path, version: int, tensors: dict[str, Any]) -> PolicyPublished:
    """Written as a file of its own."""
    from fleetbus_workers.weights.file import write_weights

    file = place / f"{version}-{next(_numbers)}.safetensors"
    return PolicyPublished(
        policy="default", version=version, lineage="l", step=1, uri=file.as_uri(),
        manifest=write_weights(file, tensors), size_bytes=file.stat().st_size,
    )  # fmt: skip


def build_request(
    seed: int, *, length: int = 12, tokens: int = 24, stops: frozenset[int] = frozenset({2}), **sampling: Any
) -> GenerationRequest:
    return GenerationRequest(
        cache_key=f"e{seed}",
        ids=[5 + (7 * seed + 11 * place) % 500 for place in range(length)],
        sampling=SamplingSettings(**sampling),
        stop_ids=stops,
        max_tokens=tokens,
        seed=seed,
    )


async def generate_all(sampler: Any, requests: list[GenerationRequest]) -> list[Generation]:
    """All at once; the answers in the order of the requests."""
    found: list[Any] = [None] * len(requests)

    async def generate(index: int) -> None:
        found[index] = await sampler.generate(requests[index])

    with anyio.fail_after(LIMIT_SECONDS):
        async with anyio.create_task_group() as group:
            for index in range(len(requests)):
                group.start_soon(generate, index)
    return found
