"""New weights in the embedded engine: between tokens, for everybody at once, and only what was checked."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import anyio
import pytest
import torch
from transformers import AutoModelForCausalLM

from fleetbus_schemas import PolicyPublished, VersionSpan
from fleetbus_workers.inference.base import Generation, WeightsRejected
from fleetbus_workers.inference.torch import TorchSampler
from fleetbus_workers.weights.file import write_weights
from tests.support.torch_engine import (
    SYSTEM,
    ask,
    compute_largest_difference,
    open_engine,
    play,
    play_all,
    slow_down,
    wait_sampled,
    write_model,
)


@pytest.fixture(scope="module")
def other_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("other"), seed=1)


def publish(folder: Path, file: Path, version: int) -> PolicyPublished:
    manifest = write_weights(file, AutoModelForCausalLM.from_pretrained(folder).state_dict())
    return PolicyPublished(
        policy="default",
        version=version,
        lineage="a",
        step=version,
        uri=file.as_uri(),
        manifest=manifest,
        size_bytes=file.stat().st_size,
    )


@pytest.mark.integration
async def test_a_swap_between_tokens_shows_in_the_spans_and_drops_nobody(
    folder: Path, other_folder: Path, tmp_path: Path
) -> None:
    published = publish(other_folder, tmp_path / "w", version=5)
    finished: list[Generation] = []

    async def long(sampler: TorchSampler, index: int) -> None:
        finished.append(await sampler.generate(ask([*SYSTEM, index], tokens=1000, key=str(index))))

    async with open_engine(folder, slots=4, version=3) as sampler:
        async with anyio.create_task_group() as tasks:
            for index in range(3):
                tasks.start_soon(long, sampler, index)
            async with slow_down(sampler):
                await wait_sampled(sampler, 10)
                await sampler.load(published)
                assert sampler.version == 5 and not finished
            beside = await play(sampler, 0)
        after = await sampler.generate(ask(SYSTEM, tokens=5, key="after"))
    assert compute_largest_difference(other_folder, {0: beside}) <= 1e-4
    for generation in finished:
        old, new = generation.versions
        assert (old.version, old.start, new.version, new.stop) == (3, 0, 5, 1000)
        assert 0 < old.stop == new.start < 1000
    assert after.versions == (VersionSpan(version=5, start=0, stop=5),)


@pytest.mark.parametrize("fast", [True, False])
async def test_turns_after_a_swap_are_those_of_a_fresh_engine(
    folder: Path, other_folder: Path, tmp_path: Path, fast: bool
) -> None:
    """Also for an episode whose earlier turns, and a prompt whose states, were kept under the old version."""
    published = publish(other_folder, tmp_path / "w", version=1)
    async with open_engine(folder, fused=fast) as sampler:
        first = await sampler.generate(ask(SYSTEM, tokens=9))
        history = [*SYSTEM, *first.ids, 1, 2, 3]
        await sampler.load(published)
        swapped = [await sampler.generate(ask(history, seed=8, tokens=30)), *[turn for _, turn in await play(sampler, 0)]]
    async with open_engine(other_folder, fused=fast, version=1) as sampler:
        fresh = [await sampler.generate(ask(history, seed=8, tokens=30)), *[turn for _, turn in await play(sampler, 0)]]
    assert [turn.ids for turn in swapped] == [turn.ids for turn in fresh]
    for one, other in zip(swapped, fresh, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-6)
        assert one.versions == other.versions


async def test_slots_forget_what_they_hold_of_an_old_version(folder: Path, other_folder: Path, tmp_path: Path) -> None:
    published = publish(other_folder, tmp_path / "w", version=1)
    async with open_engine(folder, slots=4) as sampler:
        await play_all(sampler, 6)
        await sampler.load(published)
        played = await play_all(sampler, 6)
    assert compute_largest_difference(other_folder, played) <= 1e-4


async def test_a_turn_that_saw_two_versions_is_not_kept(folder: Path, other_folder: Path, tmp_path: Path) -> None:
    published = publish(other_folder, tmp_path / "w", version=1)
    finished: list[Generation] = []

    async def long(sampler: TorchSampler) -> None:
        finished.append(await sampler.generate(ask(SYSTEM, tokens=600)))

    async with open_engine(folder) as sampler:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(long, sampler)
            async with slow_down(sampler):
                await wait_sampled(sampler, 5)
                await sampler.load(published)
        assert len(finished[0].versions) == 2
        history = [*SYSTEM, *finished[0].ids, 1]
        again = await sampler.generate(ask(history, tokens=9))
    assert compute_largest_difference(other_folder, {0: [(history, again)]}) <= 1e-4


BREAKAGES: dict[str, Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]] = {
    "not finite": lambda tensors: {name: tensor * torch.inf for name, tensor in tensors.items()},
    "half missing": lambda tensors: dict(list(tensors.items())[::2]),
    "wrong shape": lambda tensors: {name: tensor[:1] for name, tensor in tensors.items()},
    "one too many": lambda tensors: {**tensors, "extra": torch.zeros(1)},
}


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("breakage", [*BREAKAGES, "truncated", "missing"])
async def test_a_rejected_version_changes_nothing(folder: Path, tmp_path: Path, breakage: str, fast: bool) -> None:
    file = tmp_path / "w"
    published = publish(folder, file, version=9)
    if breakage == "truncated":
        file.write_bytes(file.read_bytes()[:-40])
    elif breakage == "missing":
        file.unlink()
    else:
        tensors = AutoModelForCausalLM.from_pretrained(folder).state_dict()
        tensors.pop("lm_head.weight")
        manifest = write_weights(file, BREAKAGES[breakage](tensors))
        published = PolicyPublished(
            policy="default", version=9, lineage="a", step=9, uri=str(file), manifest=manifest, size_bytes=1
        )
    async with open_engine(folder, fused=fast, version=2) as sampler:
        before = await sampler.generate(ask(SYSTEM, tokens=20))
        with pytest.raises(WeightsRejected):
            await sampler.load(published)
        after = await sampler.generate(ask(SYSTEM, tokens=20, key="other"))
    assert sampler.version == 2
    assert after.ids == before.ids and after.versions == before.versions
