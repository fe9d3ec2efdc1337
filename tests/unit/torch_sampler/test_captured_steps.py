"""Captured steps of the engine with a capture that computes anew: paddings, growth and new weights as on a GPU, without one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from fleetbus_workers.inference.torch import fused_decoder
from fleetbus_workers.inference.torch.captured_steps import CapturedSteps
from fleetbus_workers.inference.torch.fused_decoder import FusedRunner
from fleetbus_workers.inference.torch.slots import SlotCache
from fleetbus_workers.inference.torch.turn import WeightSwap
from fleetbus_workers.weights.file import unique_tensors
from tests.support.torch_engine import open_engine, play_all, write_model

Compute = Callable[[], torch.Tensor]
captures: list[torch.Tensor] = []


def compute_anew(compute: Compute) -> tuple[torch.Tensor, Callable[[], None]]:
    computed = compute()
    captures.append(computed)

    def replay() -> None:
        computed.copy_(compute())

    return computed, replay


def capture(runner: FusedRunner) -> None:
    """Let a runner on the CPU do as one on a GPU."""
    cache = runner.cache
    runner.cache = SlotCache(cache.slots, cache.max_model_len, spare=1)
    blocks = [
        runner.cache.add(tuple(block.tensor.shape), slot=1, time=block.time, dtype=torch.float32, device=runner.device)
        for block in cache.blocks
    ]
    runner._keys, runner._values = keys, values = blocks
    runner._captured = CapturedSteps(runner.weights, runner.cache, keys, values, runner.groups, compute_anew)


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> None:
    captures.clear()
    build = fused_decoder.FusedRunner

    def build_captured(*args: Any, **options: Any) -> FusedRunner:
        runner = build(*args, **options)
        capture(runner)
        return runner

    monkeypatch.setattr(fused_decoder, "FusedRunner", build_captured)


@pytest.mark.usefixtures("captured")
async def test_captured_steps_sample_what_others_do_however_many_rows_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_model(tmp_path / "model")
    async with open_engine(folder, slots=24) as sampler:
        found = await play_all(sampler, 60)
    shapes = {tuple(logits.shape) for logits in captures}
    assert {8, 16, 24} >= {rows for rows, _ in shapes} and len(captures) < 20
    assert len({logits.untyped_storage().data_ptr() for logits in captures}) == 1, "graphs share what only one uses at a time"
    monkeypatch.undo()
    async with open_engine(folder, slots=24) as sampler:
        expected = await play_all(sampler, 60)
    for episode, turns in expected.items():
        for (ids, one), (also, other) in zip(turns, found[episode], strict=True):
            assert ids == also and one.ids == other.ids
            np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-4)


@pytest.mark.usefixtures("captured")
async def test_new_weights_are_computed_with_where_the_old_ones_were_and_no_step_is_captured_again(tmp_path: Path) -> None:
    first, second = write_model(tmp_path / "first"), write_model(tmp_path / "second", seed=1)
    tensors = unique_tensors(AutoModelForCausalLM.from_pretrained(second).state_dict())
    async with open_engine(first, slots=8) as sampler:
        await play_all(sampler, 8)
        runner = sampler._runner
        assert isinstance(runner, FusedRunner) and runner._captured is not None
        replays, before = runner._captured._replays, len(captures)
        sizes = {*replays}
        await sampler._submit_and_wait(WeightSwap(1, sampler._runner.prepare(tensors)))
        found = await play_all(sampler, 8)
        assert len(captures) - before == len({*replays} - sizes), "a size that is new may have come: which rows meet is chance"
    async with open_engine(second, slots=8) as sampler:
        expected = await play_all(sampler, 8)
    assert [each.ids for _, each in found[0]] == [each.ids for _, each in expected[0]]
