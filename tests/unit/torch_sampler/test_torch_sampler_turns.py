"""Turns of the embedded engine that end otherwise: cancelled, refused, failed, or with the engine itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from fleetbus.errors import UserError
from fleetbus_schemas import EngineLoad
from fleetbus_workers.inference.base import EngineFailed
from fleetbus_workers.inference.torch import TorchSampler
from fleetbus_workers.inference.torch.engine import Engine
from fleetbus_workers.inference.torch.turn import EngineOperation
from tests.support.torch_engine import (
    SMALL,
    SYSTEM,
    VOCABULARY,
    ask,
    compute_largest_difference,
    draw_ids,
    open_engine,
    slow_down,
    wait_sampled,
)


async def test_cancelling_a_turn_frees_its_slot(folder: Path) -> None:
    async with open_engine(folder, slots=1) as sampler:
        async with slow_down(sampler), anyio.create_task_group() as tasks:
            tasks.start_soon(sampler.generate, ask(SYSTEM, tokens=1900, key="long"))
            await wait_sampled(sampler, 3)
            tasks.cancel_scope.cancel()
        assert len((await sampler.generate(ask(SYSTEM, tokens=3))).ids) == 3
        assert sampler.stats["sampled_tokens"] < 1900


async def test_a_turn_that_is_cancelled_while_it_waits_never_runs(folder: Path) -> None:
    async with open_engine(folder, slots=1) as sampler:
        async with slow_down(sampler), anyio.create_task_group() as running:
            running.start_soon(sampler.generate, ask(SYSTEM, tokens=1900, key="long"))
            await wait_sampled(sampler, 3)
            with anyio.move_on_after(0.01):
                await sampler.generate(ask(draw_ids(7, 30), key="waiting"))
            running.cancel_scope.cancel()
        await sampler.generate(ask(SYSTEM, tokens=1))
    assert sampler.stats["prefill_tokens"] + sampler.stats["cached_tokens"] == 2 * len(SYSTEM)


async def test_the_engine_tells_which_turns_it_computes_and_which_wait(folder: Path) -> None:
    async with open_engine(folder, slots=1) as sampler:
        async with slow_down(sampler), anyio.create_task_group() as tasks:
            tasks.start_soon(sampler.generate, ask(SYSTEM, tokens=1900, key="long"))
            await wait_sampled(sampler, 3)
            tasks.start_soon(sampler.generate, ask(SYSTEM, tokens=1900, key="waits"))
            await anyio.wait_all_tasks_blocked()
            assert sampler.engine_load == EngineLoad(running=1, waiting=1)
            tasks.cancel_scope.cancel()
    assert sampler.engine_load == EngineLoad(running=0, waiting=0)


async def test_an_engine_error_fails_everybody_and_ends_the_lifetime(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sampler = TorchSampler(folder, slots=1)
    refused: list[str] = []

    async def refuse(index: int) -> None:
        try:
            await sampler.generate(ask(SYSTEM, key=str(index)))
        except EngineFailed as error:
            refused.append(str(error))

    def explode(batch: Any) -> torch.Tensor:
        raise RuntimeError("out of everything")

    monkeypatch.setattr(sampler._runner, "step", explode)
    async with anyio.create_task_group() as tasks:
        with pytest.raises(EngineFailed, match="out of everything"), anyio.fail_after(50):
            async with sampler.run():
                for index in range(3):
                    tasks.start_soon(refuse, index)
                await anyio.sleep_forever()
    assert len(refused) == 3 and all("out of everything" in reason for reason in refused)
    with pytest.raises(EngineFailed, match="not running"):
        await sampler.generate(ask(SYSTEM))
    monkeypatch.undo()
    async with sampler.run():
        assert len((await sampler.generate(ask(SYSTEM, tokens=3))).ids) == 3


async def test_logits_that_are_no_numbers_fail_that_turn_alone(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with open_engine(folder, slots=4) as sampler:
        step = sampler._runner.step

        def poisoned(batch: Any) -> torch.Tensor:
            logits = step(batch)
            logits[torch.from_numpy(batch.tokens == 63)] = torch.nan
            return logits

        monkeypatch.setattr(sampler._runner, "step", poisoned)
        with pytest.raises(EngineFailed, match="log-probability of nan"):
            await sampler.generate(ask([*SYSTEM, 63], key="bad"))
        monkeypatch.undo()
        good = await sampler.generate(ask([*SYSTEM, 62], key="good"))
    assert compute_largest_difference(folder, {0: [([*SYSTEM, 62], good)]}) <= 1e-4


async def test_ids_that_the_model_does_not_have_fail_their_own_request_only(folder: Path) -> None:
    async with open_engine(folder) as sampler:
        for ids in ([], [1, VOCABULARY], [-1]):
            with pytest.raises(EngineFailed, match="ids below 64"):
                await sampler.generate(ask(ids))
        assert (await sampler.generate(ask(SYSTEM, tokens=2))).finish_reason == "length"


async def test_leaving_stops_the_thread_within_one_token_and_fails_what_is_in_flight(folder: Path) -> None:
    sampler = TorchSampler(folder, slots=2)
    failed: list[str] = []

    async def expect_failure() -> None:
        with pytest.raises(EngineFailed, match="stopped") as caught:
            await sampler.generate(ask(SYSTEM, tokens=1900))
        failed.append(str(caught.value))

    async with anyio.create_task_group() as tasks:
        with anyio.fail_after(50):
            async with slow_down(sampler), sampler.run():
                tasks.start_soon(expect_failure)
                await wait_sampled(sampler, 3)
    assert len(failed) == 1
    assert sampler.stats["sampled_tokens"] < 1900


async def test_an_error_in_the_body_comes_out_as_it_is(folder: Path) -> None:
    sampler = TorchSampler(folder, slots=1)
    with pytest.raises(KeyError, match="mine"):
        async with sampler.run():
            raise KeyError("mine")


async def test_no_more_turns_are_handed_in_than_may_wait(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    handed_in: list[EngineOperation] = []
    submit = Engine.submit

    def count(self: Engine, operation: EngineOperation) -> None:
        handed_in.append(operation)
        submit(self, operation)

    monkeypatch.setattr(Engine, "submit", count)
    async with open_engine(folder, slots=1, max_waiting=2) as sampler, slow_down(sampler), anyio.create_task_group() as tasks:
        for index in range(9):
            tasks.start_soon(sampler.generate, ask(SYSTEM, tokens=1900, key=str(index)))
        await wait_sampled(sampler, 3)
        assert len(handed_in) == 3
        tasks.cancel_scope.cancel()


def test_a_folder_without_a_model_is_a_user_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no causal language model"):
        TorchSampler(tmp_path)


def test_an_architecture_with_recurrent_state_is_refused(tmp_path: Path) -> None:
    options = {**SMALL, "layer_types": ["linear_attention", "full_attention"], "head_dim": 8}
    options |= {"num_experts": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}
    AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3_next", **options)).save_pretrained(tmp_path)
    with pytest.raises(UserError, match="linear_attention cannot be batched"):
        TorchSampler(tmp_path)
