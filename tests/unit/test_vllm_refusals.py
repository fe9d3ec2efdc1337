"""Settings that vLLM has not are refused for the request that has them, and end no worker. vLLM itself is not needed."""

from __future__ import annotations

import itertools
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import anyio
import pytest

from fleetbus_schemas import SamplingSettings
from fleetbus_workers.inference.base import GenerationRequest, RequestRefused
from fleetbus_workers.inference.vllm.engine import EngineSettings
from fleetbus_workers.inference.vllm.sampler import VllmSampler
from tests.support.backends import asyncio_alone

anyio_backend = asyncio_alone


def check(*, temperature: float, **_: object) -> None:
    """As vLLM's `SamplingParams` does."""
    if temperature < 0.0:
        raise ValueError(f"temperature must be non-negative, got {temperature}.")


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    found: dict[str, dict[str, Any]] = {
        "vllm": {"SamplingParams": check, "TokensPrompt": dict},
        "vllm.sampling_params": {"RequestOutputKind": type("RequestOutputKind", (), {"FINAL_ONLY": 0})},
        "vllm.v1.engine.exceptions": {"EngineDeadError": type("EngineDeadError", (Exception,), {})},
    }
    for name in ("vllm", "vllm.sampling_params", "vllm.v1", "vllm.v1.engine", "vllm.v1.engine.exceptions"):
        module = ModuleType(name)
        vars(module).update(found.get(name, {}))
        monkeypatch.setitem(sys.modules, name, module)


@pytest.mark.usefixtures("vllm")
async def test_a_temperature_that_vllm_refuses_refuses_the_request_and_ends_no_worker(tmp_path: Path) -> None:
    sampler = VllmSampler.__new__(VllmSampler)  # without an engine, which is never asked
    sampler.version, sampler._settings = 0, EngineSettings(folder=tmp_path, slots=1, max_model_len=64)
    sampler._alive, sampler._engine, sampler._adapter, sampler._salt = anyio.Event(), None, None, "0"
    sampler._folder, sampler._adapters_in_use, sampler._numbers = tmp_path, Counter(), itertools.count()
    sampler._alive.set()
    request = GenerationRequest(
        cache_key="e", ids=[1], sampling=SamplingSettings(temperature=-1.0), stop_ids=frozenset(), max_tokens=4, seed=0
    )
    with pytest.raises(RequestRefused, match="temperature must be non-negative"):
        await sampler.generate(request)
