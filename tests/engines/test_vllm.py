"""`VllmSampler` for real, with the starter policy: `just test-vllm` makes the environment that it needs and runs this."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import anyio
import psutil
import pytest

from fleetbus_schemas import PolicyPublished, SamplingSettings
from fleetbus_workers.inference.base import GenerationRequest, RequestRefused
from fleetbus_workers.weights.file import WeightsRejected
from tests.support.vllm_engine import (
    CLOSE,
    LENGTH,
    LIMIT_SECONDS,
    MARKS,
    STARTER,
    build_request,
    generate_all,
    move_weights,
    open_sampler,
    until_sampled,
)
from tests.support.vllm_engine import publish as write_version

pytestmark = MARKS


@pytest.fixture(scope="module")
async def sampler(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Any]:
    """One engine for all of these tests."""
    async with open_sampler(STARTER, tmp_path_factory.mktemp("served")) as made:
        yield made


@pytest.fixture(scope="module")
async def reference() -> AsyncIterator[Callable[[PolicyPublished | None], Any]]:
    """The torch sampler, with a version loaded."""
    from fleetbus_workers.inference.torch import TorchSampler

    sampler = TorchSampler(STARTER, slots=16, max_model_len=LENGTH)
    async with sampler.run():

        async def at(policy: PolicyPublished | None) -> Any:
            if policy is not None:
                await sampler.load(policy)
            return sampler

        yield at


@pytest.fixture(scope="module")
def publish(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., PolicyPublished]:
    """Versions that differ from the starter policy by noise of a seed."""
    place = tmp_path_factory.mktemp("versions")

    def make(version: int, *, seed: int, spoil: Callable[[dict[str, Any]], None] = lambda tensors: None) -> PolicyPublished:
        tensors = move_weights(seed)
        spoil(tensors)
        return write_version(place, version, tensors)

    return make


def difference(one: list[float], other: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(one, other, strict=True))


async def test_greedy_tokens_are_those_of_the_torch_sampler_and_logprobs_within_1e_4(sampler: Any, reference: Any) -> None:
    requests = [build_request(seed, temperature=0.0) for seed in range(8)]
    torch_sampler = await reference(None)
    for ours, theirs in zip(await generate_all(sampler, requests), await generate_all(torch_sampler, requests), strict=True):
        assert ours.ids == theirs.ids
        assert ours.finish_reason == theirs.finish_reason
        assert difference(ours.logprobs, theirs.logprobs) < CLOSE


async def test_logprobs_are_those_at_the_sampling_temperature(sampler: Any) -> None:
    for heat in (1.0, 0.6):
        requests = [build_request(seed, temperature=heat) for seed in range(4)]
        for request, generation in zip(requests, await generate_all(sampler, requests), strict=True):
            assert difference(generation.logprobs, forward(request, generation.ids)) < CLOSE


def forward(request: GenerationRequest, ids: list[int]) -> list[float]:
    """Log-probabilities of ``ids`` after the request's under the starter policy, by transformers' own forward call."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(STARTER, dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.tensor([[*request.ids, *ids]])).logits[0]
    values = (logits / request.sampling.temperature).log_softmax(-1)
    return [float(values[len(request.ids) - 1 + place, token]) for place, token in enumerate(ids)]


async def test_the_same_seed_gives_the_same_tokens_whatever_runs_beside(sampler: Any) -> None:
    alone = await sampler.generate(build_request(3))
    among = await generate_all(sampler, [build_request(seed) for seed in range(6)])
    assert among[3].ids == alone.ids


async def test_many_long_prompts_at_once_with_seeds_do_not_end_the_engine(sampler: Any) -> None:
    """More prompt tokens than one step takes: computed in parts, a seeded request would kill a CPU engine (vLLM 0.32)."""
    requests = [build_request(seed, length=490, tokens=4) for seed in range(24)]
    generations = await generate_all(sampler, requests)
    assert all(generation.ids for generation in generations)
    assert sampler.stats["engine_restarts"] == 0


async def test_new_weights_answer_as_a_torch_engine_with_them_also_for_prompts_that_are_cached(
    sampler: Any, reference: Any, publish: Any
) -> None:
    """The prompt fills cache blocks (128 tokens each on a CPU), which are stale after the swap."""
    requests = [build_request(seed, length=300, temperature=0.0, tokens=8) for seed in range(2)]
    await generate_all(sampler, requests)
    cached = sampler.stats["cached_tokens"]
    await generate_all(sampler, requests)
    assert sampler.stats["cached_tokens"] > cached
    version = sampler.version + 1
    policy = publish(version, seed=11)
    await sampler.load(policy)
    torch_sampler = await reference(policy)
    for ours, theirs in zip(await generate_all(sampler, requests), await generate_all(torch_sampler, requests), strict=True):
        assert ours.ids == theirs.ids
        assert difference(ours.logprobs, theirs.logprobs) < CLOSE
        assert [span.version for span in ours.versions] == [version]


async def test_a_swap_in_mid_generation_drops_nothing_and_gives_a_span_by_version(sampler: Any, publish: Any) -> None:
    old, policy, before = sampler.version, publish(sampler.version + 1, seed=12), sampler.stats["sampled_tokens"]
    request = GenerationRequest(
        cache_key="long", ids=[9, 8, 7], sampling=SamplingSettings(), stop_ids=frozenset(), max_tokens=480, seed=1
    )
    found: list[Any] = []

    async def generate() -> None:
        found.append(await sampler.generate(request))

    with anyio.fail_after(LIMIT_SECONDS):
        async with anyio.create_task_group() as group:
            group.start_soon(generate)
            await until_sampled(sampler, before)
            await sampler.load(policy)
    [generation] = found
    assert len(generation.ids) == len(generation.logprobs) == 480
    assert [span.version for span in generation.versions] == [old, old + 1]
    first, second = generation.versions
    assert 0 == first.start < first.stop == second.start < second.stop == 480


async def run_turns_across_swap(sampler: Any, reference: Any, policy: PolicyPublished) -> list[float]:
    """Differences of log-probabilities of turns that waited in the engine's queue while it was swapped, with cached prompts."""
    requests = [build_request(seed, length=300, temperature=0.0, tokens=64) for seed in range(12)]
    await generate_all(sampler, requests)
    found: list[Any] = []

    async def play() -> None:
        found.extend(await generate_all(sampler, requests * 4))

    before = sampler.stats["sampled_tokens"]
    async with anyio.create_task_group() as group:
        group.start_soon(play)
        await until_sampled(sampler, before)
        await sampler.load(policy)
    expected = await generate_all(await reference(policy), requests)
    whole = [(ours, expected[index % 12]) for index, ours in enumerate(found) if len(ours.versions) == 1]
    after = [(ours, theirs) for ours, theirs in whole if ours.versions[0].version == policy.version]
    assert after, "every turn had begun before the swap"
    return [difference(ours.logprobs, theirs.logprobs) for ours, theirs in after if ours.ids == theirs.ids] + [
        1.0 for ours, theirs in after if ours.ids != theirs.ids
    ]


async def test_turns_that_wait_while_the_weights_are_swapped_do_not_meet_the_old_keys_and_values(
    sampler: Any, reference: Any, publish: Any
) -> None:
    differences = await run_turns_across_swap(sampler, reference, publish(sampler.version + 1, seed=21))
    print(f"{len(differences)} turns, differing by up to {max(differences):.2g}")
    assert max(differences) < CLOSE


def missing_half(tensors: dict[str, Any]) -> None:
    for name in sorted(tensors)[::2]:
        del tensors[name]


def wrong_shape(tensors: dict[str, Any]) -> None:
    tensors["model.norm.weight"] = tensors["model.norm.weight"][:-1].clone()


def not_a_number(tensors: dict[str, Any]) -> None:
    tensors["model.norm.weight"][0] = float("nan")


@pytest.mark.parametrize("spoil", [missing_half, wrong_shape, not_a_number])
async def test_bad_weights_are_refused_before_the_engine_sees_them(sampler: Any, publish: Any, spoil: Any) -> None:
    before = await sampler.generate(build_request(1, temperature=0.0))
    with pytest.raises(WeightsRejected):
        await sampler.load(publish(sampler.version + 1, seed=13, spoil=spoil))
    assert (await sampler.generate(build_request(1, temperature=0.0))).ids == before.ids


async def test_a_missing_or_truncated_file_is_refused(sampler: Any, publish: Any) -> None:
    for spoil in (lambda file: file.unlink(), lambda file: file.write_bytes(file.read_bytes()[:2000])):
        policy = publish(sampler.version + 1, seed=14)
        spoil(Path(policy.uri.removeprefix("file://")))
        with pytest.raises(WeightsRejected, match="cannot be read"):
            await sampler.load(policy)


async def test_a_load_that_fails_within_the_engine_leaves_the_old_version_answering(
    sampler: Any, publish: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when a disk fails after the checks: the engine is shown a folder with half a file."""
    before = await sampler.generate(build_request(1, temperature=0.0))
    prepare = sampler._weights.prepare

    def spoiled(policy: PolicyPublished) -> Path:
        folder: Path = prepare(policy)
        file = folder / "model.safetensors"
        content = file.read_bytes()
        file.unlink()
        file.write_bytes(content[: len(content) // 2])
        return folder

    monkeypatch.setattr(sampler._weights, "prepare", spoiled)
    version = sampler.version
    with pytest.raises(WeightsRejected, match="did not load"):
        await sampler.load(publish(version + 1, seed=15))
    after = await sampler.generate(build_request(1, temperature=0.0))
    assert (after.ids, after.versions[0].version, sampler.version) == (before.ids, version, version)
    assert difference(after.logprobs, before.logprobs) < CLOSE


async def test_the_engine_tells_how_busy_it_is(sampler: Any) -> None:
    """24 turns in 16 places: some wait; each meets no others in the end."""
    requests = [build_request(seed, length=300, tokens=60, stops=frozenset()) for seed in range(24)]
    before, loads = sampler.stats["sampled_tokens"], []

    async def watch() -> None:
        while True:
            loads.append(sampler.engine_load)
            await anyio.sleep(0.02)

    async with anyio.create_task_group() as group:
        group.start_soon(watch)
        await generate_all(sampler, requests)
        group.cancel_scope.cancel()
    assert max(load.running for load in loads) == 16 and max(load.waiting for load in loads) >= 1
    assert 0 < max(load.kv_cache_use for load in loads) <= 1
    assert sampler.stats["sampled_tokens"] - before == 24 * 60
    assert (sampler.engine_load.running, sampler.engine_load.waiting) == (0, 0)


async def test_a_cancelled_request_frees_its_place(sampler: Any) -> None:
    with anyio.move_on_after(0.05):
        await sampler.generate(build_request(5, tokens=480))
    with anyio.fail_after(LIMIT_SECONDS):
        while sampler._engine.output_processor.get_num_unfinished_requests():  # noqa: ASYNC110
            await anyio.sleep(0.01)
    assert (await sampler.generate(build_request(6, tokens=4))).ids


async def test_what_cannot_be_answered_is_refused_or_ends_at_its_length(sampler: Any) -> None:
    with pytest.raises(RequestRefused, match="top_p"):
        await sampler.generate(build_request(1, top_p=0.9))
    full = await sampler.generate(build_request(1, length=LENGTH))
    assert (full.ids, full.finish_reason) == ([], "length")
    last = await sampler.generate(build_request(1, length=LENGTH - 3, temperature=0.0))
    assert len(last.ids) <= 3


async def test_requests_outlive_the_engine_that_is_killed_under_them(sampler: Any) -> None:
    expected = (await sampler.generate(build_request(7, temperature=0.0, tokens=200))).ids
    version, restarts, before = sampler.version, sampler.stats["engine_restarts"], sampler.stats["sampled_tokens"]
    found: list[Any] = []

    async def generate() -> None:
        found.append(await sampler.generate(build_request(7, temperature=0.0, tokens=200)))

    with anyio.fail_after(LIMIT_SECONDS):
        async with anyio.create_task_group() as group:
            group.start_soon(generate)
            await until_sampled(sampler, before)
            for child in psutil.Process().children(recursive=True):
                if "resource_tracker" not in " ".join(child.cmdline()):
                    os.kill(child.pid, signal.SIGKILL)
    [generation] = found
    assert generation.ids == expected
    assert [span.version for span in generation.versions] == [version]
    assert sampler.stats["engine_restarts"] == restarts + 1
