"""The embedded engine: what it samples is what the model says, whatever shares the batch, stays cached or is swapped."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from fleetbus.errors import UserError
from schemas import PolicyPublished, SamplingSettings, VersionSpan
from workers.inference.base import EngineFailed, Generation, GenerationRequest, WeightsRejected
from workers.inference.torch import TorchSampler, compact, kernel
from workers.inference.torch.compact import CompactRunner
from workers.inference.torch.engine import Engine
from workers.inference.torch.generic import GenericRunner
from workers.inference.torch.turn import Errand
from workers.weights import write_weights

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
    "qwen3": ("qwen3", {"head_dim": 8, "tie_word_embeddings": True}, CompactRunner),
    "qwen2": ("qwen2", {}, CompactRunner),
    "llama": ("llama", {"attention_bias": True}, CompactRunner),
    "llama with long rotations": (
        "llama",
        {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 64}},
        CompactRunner,
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


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


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


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


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


def ask(
    ids: list[int], *, seed: int = 0, tokens: int = 8, key: str = "e", stop: frozenset[int] = frozenset(), **how: Any
) -> Any:
    settings = SamplingSettings(**how)
    return GenerationRequest(cache_key=key, ids=ids, sampling=settings, stop_ids=stop, max_tokens=tokens, seed=seed)


def some_ids(seed: int, count: int) -> list[int]:
    return random.Random(seed).choices(range(VOCABULARY), k=count)


SYSTEM = some_ids(1000, 70)


async def play(sampler: TorchSampler, episode: int, turns: int = 3) -> list[tuple[list[int], Generation]]:
    """A whole episode of random shape: the history before each turn and what was sampled."""
    shape = random.Random(episode)
    ids = SYSTEM + some_ids(episode // 2, shape.randint(1, 30))
    played = []
    for turn in range(turns):
        request = ask(ids, seed=100 * episode + turn, tokens=shape.randint(1, 20), key=f"e{episode}")
        generation = await sampler.generate(request)
        played.append((ids, generation))
        ids = ids + generation.ids + some_ids(100 * episode + turn, shape.randint(1, 25))
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


def furthest_from_model(folder: Path, played: dict[int, list[tuple[list[int], Generation]]]) -> float:
    """Largest difference between sampled log-probabilities and those of transformers' forward call on the whole history."""
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    worst = 0.0
    for ids, generation in [turn for turns in played.values() for turn in turns]:
        with torch.no_grad():
            logprobs = model(torch.tensor([ids + generation.ids])).logits[0, len(ids) - 1 : -1].log_softmax(-1)
        expected = logprobs.gather(1, torch.tensor(generation.ids)[:, None])[:, 0]
        worst = max(worst, float((expected - torch.tensor(generation.logprobs)).abs().max()))
    return worst


@asynccontextmanager
async def engine(folder: Path, **options: Any) -> AsyncIterator[TorchSampler]:
    sampler = TorchSampler(folder, **options)
    with anyio.fail_after(20):
        async with sampler.running():
            yield sampler


@pytest.mark.parametrize("slots", [1, 7, 32])
@pytest.mark.parametrize("fast", [True, False])
async def test_logprobs_are_those_of_the_plain_model(folder: Path, slots: int, fast: bool) -> None:
    async with engine(folder, slots=slots, compact=fast) as sampler:
        played = await play_all(sampler, 12 if slots > 1 else 4)
    assert furthest_from_model(folder, played) <= 1e-4


@pytest.mark.parametrize("family", FAMILIES)
async def test_every_family_runs_and_agrees_with_its_plain_model(tmp_path: Path, family: str) -> None:
    folder = write_model(tmp_path, family)
    async with engine(folder, slots=4) as sampler:
        assert type(sampler._runner) is FAMILIES[family][2]
        played = await play_all(sampler, 6)
    assert furthest_from_model(folder, played) <= 1e-4


async def test_the_compact_step_is_the_same_uncompiled(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compact, "compiled_step", kernel.step)
    async with engine(folder, slots=7) as sampler:
        played = await play_all(sampler, 7)
    assert furthest_from_model(folder, played) <= 1e-4


async def test_histories_longer_than_the_first_memory_and_than_one_block(folder: Path) -> None:
    """Slots grow while rows are in use, and a long prompt attends in several blocks."""
    played: dict[int, list[tuple[list[int], Generation]]] = {}

    async def one(sampler: TorchSampler, count: int) -> None:
        ids = some_ids(count, count)
        played[count] = [(ids, await sampler.generate(ask(ids, tokens=12, key=str(count))))]

    async with engine(folder, slots=4) as sampler, anyio.create_task_group() as tasks:
        for count in (20, 700, 40, 265, 1100, 3):
            tasks.start_soon(one, sampler, count)
    assert furthest_from_model(folder, played) <= 1e-4


async def test_the_same_seed_gives_the_same_tokens_whatever_else_runs(folder: Path) -> None:
    async with engine(folder, slots=1) as sampler:
        alone = await play(sampler, 3)
    async with engine(folder, slots=8) as sampler:
        among_others = (await play_all(sampler, 20))[3]
    async with engine(folder, slots=8, compact=False) as sampler:
        elsewhere = (await play_all(sampler, 5))[3]
    assert [turn.ids for _, turn in alone] == [turn.ids for _, turn in among_others] == [turn.ids for _, turn in elsewhere]
    assert [ids for ids, _ in alone] == [ids for ids, _ in among_others]


async def test_different_seeds_give_different_tokens(folder: Path) -> None:
    async with engine(folder) as sampler:
        one = await sampler.generate(ask(SYSTEM, seed=1, tokens=30))
        two = await sampler.generate(ask(SYSTEM, seed=2, tokens=30))
    assert one.ids != two.ids


async def test_what_is_kept_changes_nothing_but_the_work(folder: Path) -> None:
    async with engine(folder, slots=4) as sampler:
        keeping, saved = await play_all(sampler, 10), sampler.stats
    async with engine(folder, slots=4, kept_histories=0, kept_prompts=0) as sampler:
        forgetting, spent = await play_all(sampler, 10), sampler.stats
    for episode, turns in forgetting.items():
        for (_, anew), (_, reused) in zip(turns, keeping[episode], strict=True):
            assert anew.ids == reused.ids
            assert anew.logprobs == pytest.approx(reused.logprobs, abs=1e-5)
    assert spent["cached_tokens"] == 0
    assert saved["prefill_tokens"] + saved["cached_tokens"] == spent["prefill_tokens"]
    assert saved["prefill_tokens"] < spent["prefill_tokens"] / 3
    assert saved["sampled_tokens"] == spent["sampled_tokens"] == sum(len(t.ids) for turns in keeping.values() for _, t in turns)


async def test_a_second_turn_computes_its_delta_alone(folder: Path) -> None:
    async with engine(folder) as sampler:
        first = await sampler.generate(ask(SYSTEM, tokens=5))
        before = sampler.stats["prefill_tokens"]
        await sampler.generate(ask([*SYSTEM, *first.ids, 1, 2, 3], tokens=5))
        assert sampler.stats["prefill_tokens"] - before == 4  # the delta and the last sampled token
        sampler.forget("e")
        before = sampler.stats["prefill_tokens"]
        await sampler.generate(ask([*SYSTEM, *first.ids, 1, 2, 3], tokens=5))
        assert sampler.stats["prefill_tokens"] - before == 8  # the prompt is still shared


async def test_prompts_that_arrive_together_compute_what_they_share_once(folder: Path) -> None:
    async with engine(folder, slots=8) as sampler, anyio.create_task_group() as tasks:
        for index in range(8):
            tasks.start_soon(sampler.generate, ask([*SYSTEM, index], key=str(index)))
    assert sampler.stats["prefill_tokens"] == len(SYSTEM) + 1 + 7


async def test_a_history_that_does_not_continue_what_was_kept_is_computed_from_where_they_part(folder: Path) -> None:
    async with engine(folder) as sampler:
        first = await sampler.generate(ask(SYSTEM, tokens=9))
        rewritten = [*SYSTEM, *first.ids[:4], (first.ids[4] + 1) % VOCABULARY, 5, 6]
        again = await sampler.generate(ask(rewritten, tokens=9))
    assert furthest_from_model(folder, {0: [(SYSTEM, first), (rewritten, again)]}) <= 1e-4


async def test_a_stop_token_ends_the_turn_and_is_its_last_id(folder: Path) -> None:
    async with engine(folder) as sampler:
        free = await sampler.generate(ask(SYSTEM, tokens=20))
        stop = free.ids[6]
        stopped = await sampler.generate(ask(SYSTEM, tokens=20, stop=frozenset({stop})))
    assert stopped.finish_reason == "stop"
    assert stopped.ids == free.ids[: free.ids.index(stop) + 1]
    assert len(stopped.logprobs) == len(stopped.ids)


async def test_using_up_the_tokens_is_a_finish_by_length(folder: Path) -> None:
    async with engine(folder, max_length=80) as sampler:
        by_request = await sampler.generate(ask(SYSTEM, tokens=4))
        by_engine = await sampler.generate(ask(SYSTEM, tokens=400))
        without_room = await sampler.generate(ask([*SYSTEM, *SYSTEM], tokens=4))
    assert (by_request.finish_reason, len(by_request.ids)) == ("length", 4)
    assert (by_engine.finish_reason, len(by_engine.ids)) == ("length", 10)
    assert (without_room.finish_reason, without_room.ids, without_room.versions) == ("length", [], ())


async def test_histories_end_where_the_positions_of_the_model_end(tmp_path: Path) -> None:
    config = AutoConfig.for_model("gpt2", vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=90)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    async with engine(tmp_path) as sampler:
        generation = await sampler.generate(ask(SYSTEM, tokens=400))
    assert (generation.finish_reason, len(generation.ids)) == ("length", 20)
    assert furthest_from_model(tmp_path, {0: [(SYSTEM, generation)]}) <= 1e-4


async def test_greedy_and_tempered_turns_have_the_logprobs_that_they_promise(folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    async with engine(folder) as sampler:
        greedy = await sampler.generate(ask(SYSTEM, temperature=0.0, tokens=10))
        tempered = await sampler.generate(ask(SYSTEM, temperature=2.5, top_p=0.7, tokens=10, seed=4))
    for generation, temperature in ((greedy, 1.0), (tempered, 2.5)):
        with torch.no_grad():
            logits = model(torch.tensor([SYSTEM + generation.ids])).logits[0, len(SYSTEM) - 1 : -1]
        chosen = (logits / temperature).log_softmax(-1).gather(1, torch.tensor(generation.ids)[:, None])[:, 0]
        assert generation.logprobs == pytest.approx(chosen.tolist(), abs=1e-4)
        assert generation is not greedy or generation.ids == logits.argmax(-1).tolist()


async def test_cancelling_a_turn_frees_its_slot(folder: Path) -> None:
    async with engine(folder, slots=1) as sampler:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(sampler.generate, ask(SYSTEM, tokens=1900, key="long"))
            await sampled_more_than(sampler, 3)
            tasks.cancel_scope.cancel()
        assert len((await sampler.generate(ask(SYSTEM, tokens=3))).ids) == 3
        assert sampler.stats["sampled_tokens"] < 1900


async def test_a_turn_that_is_cancelled_while_it_waits_never_runs(folder: Path) -> None:
    async with engine(folder, slots=1) as sampler:
        async with anyio.create_task_group() as running:
            running.start_soon(sampler.generate, ask(SYSTEM, tokens=1900, key="long"))
            await sampled_more_than(sampler, 3)
            with anyio.move_on_after(0.01):
                await sampler.generate(ask(some_ids(7, 30), key="waiting"))
            running.cancel_scope.cancel()
        await sampler.generate(ask(SYSTEM, tokens=1))
    assert sampler.stats["prefill_tokens"] + sampler.stats["cached_tokens"] == 2 * len(SYSTEM)


async def sampled_more_than(sampler: TorchSampler, tokens: int) -> None:
    while sampler.stats["sampled_tokens"] <= tokens:
        await anyio.lowlevel.checkpoint()


async def test_a_swap_between_tokens_shows_in_the_spans_and_drops_nobody(
    folder: Path, other_folder: Path, tmp_path: Path
) -> None:
    published = publish(other_folder, tmp_path / "w", version=5)
    finished: list[Generation] = []

    async def long(sampler: TorchSampler, index: int) -> None:
        finished.append(await sampler.generate(ask([*SYSTEM, index], tokens=1000, key=str(index))))

    async with engine(folder, slots=4, version=3) as sampler:
        async with anyio.create_task_group() as tasks:
            for index in range(3):
                tasks.start_soon(long, sampler, index)
            await sampled_more_than(sampler, 10)
            await sampler.load(published)
            assert sampler.version == 5 and not finished
            beside = await play(sampler, 0)
        after = await sampler.generate(ask(SYSTEM, tokens=5, key="after"))
    assert furthest_from_model(other_folder, {0: beside}) <= 1e-4
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
    async with engine(folder, compact=fast) as sampler:
        first = await sampler.generate(ask(SYSTEM, tokens=9))
        history = [*SYSTEM, *first.ids, 1, 2, 3]
        await sampler.load(published)
        swapped = [await sampler.generate(ask(history, seed=8, tokens=30)), *[turn for _, turn in await play(sampler, 0)]]
    async with engine(other_folder, compact=fast, version=1) as sampler:
        fresh = [await sampler.generate(ask(history, seed=8, tokens=30)), *[turn for _, turn in await play(sampler, 0)]]
    assert [turn.ids for turn in swapped] == [turn.ids for turn in fresh]
    for one, other in zip(swapped, fresh, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-6)
        assert one.versions == other.versions


async def test_slots_forget_what_they_hold_of_an_old_version(folder: Path, other_folder: Path, tmp_path: Path) -> None:
    published = publish(other_folder, tmp_path / "w", version=1)
    async with engine(folder, slots=4) as sampler:
        await play_all(sampler, 6)
        await sampler.load(published)
        played = await play_all(sampler, 6)
    assert furthest_from_model(other_folder, played) <= 1e-4


async def test_a_turn_that_saw_two_versions_is_not_kept(folder: Path, other_folder: Path, tmp_path: Path) -> None:
    published = publish(other_folder, tmp_path / "w", version=1)
    finished: list[Generation] = []

    async def long(sampler: TorchSampler) -> None:
        finished.append(await sampler.generate(ask(SYSTEM, tokens=600)))

    async with engine(folder) as sampler:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(long, sampler)
            await sampled_more_than(sampler, 5)
            await sampler.load(published)
        assert len(finished[0].versions) == 2
        history = [*SYSTEM, *finished[0].ids, 1]
        again = await sampler.generate(ask(history, tokens=9))
    assert furthest_from_model(other_folder, {0: [(history, again)]}) <= 1e-4


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
    async with engine(folder, compact=fast, version=2) as sampler:
        before = await sampler.generate(ask(SYSTEM, tokens=20))
        with pytest.raises(WeightsRejected):
            await sampler.load(published)
        after = await sampler.generate(ask(SYSTEM, tokens=20, key="other"))
    assert sampler.version == 2
    assert after.ids == before.ids and after.versions == before.versions


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
        with pytest.raises(EngineFailed, match="out of everything"), anyio.fail_after(20):
            async with sampler.running():
                for index in range(3):
                    tasks.start_soon(refuse, index)
                await anyio.sleep_forever()
    assert len(refused) == 3 and all("out of everything" in reason for reason in refused)
    with pytest.raises(EngineFailed, match="not running"):
        await sampler.generate(ask(SYSTEM))
    monkeypatch.undo()
    async with sampler.running():
        assert len((await sampler.generate(ask(SYSTEM, tokens=3))).ids) == 3


async def test_logits_that_are_no_numbers_fail_that_turn_alone(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with engine(folder, slots=4) as sampler:
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
    assert furthest_from_model(folder, {0: [([*SYSTEM, 62], good)]}) <= 1e-4


async def test_ids_that_the_model_does_not_have_fail_their_own_request_only(folder: Path) -> None:
    async with engine(folder) as sampler:
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
        with anyio.fail_after(20):
            async with sampler.running():
                tasks.start_soon(expect_failure)
                await sampled_more_than(sampler, 3)
    assert len(failed) == 1
    assert sampler.stats["sampled_tokens"] < 1900


async def test_an_error_in_the_body_comes_out_as_it_is(folder: Path) -> None:
    sampler = TorchSampler(folder, slots=1)
    with pytest.raises(KeyError, match="mine"):
        async with sampler.running():
            raise KeyError("mine")


async def test_no_more_turns_are_handed_in_than_may_wait(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    handed_in: list[Errand] = []
    hand_in = Engine.hand_in

    def count(self: Engine, errand: Errand) -> None:
        handed_in.append(errand)
        hand_in(self, errand)

    monkeypatch.setattr(Engine, "hand_in", count)
    async with engine(folder, slots=1, max_waiting=2) as sampler, anyio.create_task_group() as tasks:
        for index in range(9):
            tasks.start_soon(sampler.generate, ask(SYSTEM, tokens=1900, key=str(index)))
        await sampled_more_than(sampler, 3)
        assert len(handed_in) == 3
        tasks.cancel_scope.cancel()


def test_the_engine_runs_under_trio_as_well(folder: Path) -> None:
    async def main() -> Generation:
        async with engine(folder) as sampler:
            return await sampler.generate(ask(SYSTEM, tokens=4))

    assert anyio.run(main, backend="trio").ids == anyio.run(main, backend="asyncio").ids


def test_a_folder_without_a_model_is_a_user_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no causal language model"):
        TorchSampler(tmp_path)


def test_an_architecture_with_recurrent_state_is_refused(tmp_path: Path) -> None:
    options = {**SMALL, "layer_types": ["linear_attention", "full_attention"], "head_dim": 8}
    options |= {"num_experts": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}
    AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3_next", **options)).save_pretrained(tmp_path)
    with pytest.raises(UserError, match="linear_attention cannot be batched"):
        TorchSampler(tmp_path)
