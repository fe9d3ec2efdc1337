"""The embedded engine: what it samples is what the model says, whatever shares the batch or stays cached."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from fleetbus_workers.inference.base import Generation, RequestRefused
from fleetbus_workers.inference.torch import TorchSampler
from tests.support.torch_engine import (
    FAMILIES,
    SYSTEM,
    VOCABULARY,
    ask,
    compute_largest_difference,
    draw_ids,
    open_engine,
    play,
    play_all,
    write_model,
)


@pytest.mark.integration
@pytest.mark.parametrize("slots", [1, 7, 32])
@pytest.mark.parametrize("fast", [True, False])
async def test_logprobs_are_those_of_the_plain_model(folder: Path, slots: int, fast: bool) -> None:
    async with open_engine(folder, slots=slots, fused=fast) as sampler:
        played = await play_all(sampler, 12 if slots > 1 else 4)
    assert compute_largest_difference(folder, played) <= 1e-4


@pytest.mark.integration
@pytest.mark.parametrize("family", FAMILIES)
async def test_every_family_runs_and_agrees_with_its_plain_model(tmp_path: Path, family: str) -> None:
    folder = write_model(tmp_path, family)
    async with open_engine(folder, slots=4) as sampler:
        assert type(sampler._runner) is FAMILIES[family][2]
        played = await play_all(sampler, 6)
    assert compute_largest_difference(folder, played) <= 1e-4


async def test_the_compact_step_in_bfloat16_differs_by_rounding_alone(folder: Path) -> None:
    async with open_engine(folder, slots=7, dtype=torch.bfloat16) as sampler:
        played = await play_all(sampler, 7)
    assert 1e-5 < compute_largest_difference(folder, played) <= 0.5


async def test_histories_longer_than_the_first_memory_and_than_one_block(folder: Path) -> None:
    """Slots grow while rows are in use, and a long prompt attends in several blocks."""
    played: dict[int, list[tuple[list[int], Generation]]] = {}

    async def one(sampler: TorchSampler, count: int) -> None:
        ids = draw_ids(count, count)
        played[count] = [(ids, await sampler.generate(ask(ids, tokens=12, key=str(count))))]

    async with open_engine(folder, slots=4) as sampler, anyio.create_task_group() as tasks:
        for count in (20, 700, 40, 265, 1100, 3):
            tasks.start_soon(one, sampler, count)
    assert compute_largest_difference(folder, played) <= 1e-4


async def test_the_same_seed_gives_the_same_tokens_whatever_else_runs(folder: Path) -> None:
    async with open_engine(folder, slots=1) as sampler:
        alone = await play(sampler, 3)
    async with open_engine(folder, slots=8) as sampler:
        among_others = (await play_all(sampler, 20))[3]
    async with open_engine(folder, slots=8, fused=False) as sampler:
        elsewhere = (await play_all(sampler, 5))[3]
    assert [turn.ids for _, turn in alone] == [turn.ids for _, turn in among_others] == [turn.ids for _, turn in elsewhere]
    assert [ids for ids, _ in alone] == [ids for ids, _ in among_others]


async def test_different_seeds_give_different_tokens(folder: Path) -> None:
    async with open_engine(folder) as sampler:
        one = await sampler.generate(ask(SYSTEM, seed=1, tokens=30))
        two = await sampler.generate(ask(SYSTEM, seed=2, tokens=30))
    assert one.ids != two.ids


async def test_what_is_kept_changes_nothing_but_the_work(folder: Path) -> None:
    async with open_engine(folder, slots=4) as sampler:
        keeping, saved = await play_all(sampler, 10), sampler.stats
    async with open_engine(folder, slots=4, cached_histories=0, cached_prompts=0) as sampler:
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
    async with open_engine(folder) as sampler:
        first = await sampler.generate(ask(SYSTEM, tokens=5))
        before = sampler.stats["prefill_tokens"]
        await sampler.generate(ask([*SYSTEM, *first.ids, 1, 2, 3], tokens=5))
        assert sampler.stats["prefill_tokens"] - before == 4  # the delta and the last sampled token
        sampler.forget("e")
        before = sampler.stats["prefill_tokens"]
        await sampler.generate(ask([*SYSTEM, *first.ids, 1, 2, 3], tokens=5))
        assert sampler.stats["prefill_tokens"] - before == 8  # the prompt is still shared


async def test_prompts_that_arrive_together_compute_what_they_share_once(folder: Path) -> None:
    async with open_engine(folder, slots=8) as sampler, anyio.create_task_group() as tasks:
        for index in range(8):
            tasks.start_soon(sampler.generate, ask([*SYSTEM, index], key=str(index)))
    assert sampler.stats["prefill_tokens"] == len(SYSTEM) + 1 + 7


async def test_a_short_question_after_a_known_beginning_is_computed_once_for_its_group(folder: Path) -> None:
    async with open_engine(folder, slots=8) as sampler:
        await sampler.generate(ask([*SYSTEM, 0], key="first"))
        before = sampler.stats["prefill_tokens"]
        question = draw_ids(7, 12)
        async with anyio.create_task_group() as tasks:
            for index in range(8):
                tasks.start_soon(sampler.generate, ask([*SYSTEM, *question], key=str(index)))
        computed = sampler.stats["prefill_tokens"] - before
        assert len(question) <= computed <= len(question) + 7, "one more for each that joins in a later step"


async def test_a_history_that_does_not_continue_what_was_kept_is_computed_from_where_they_part(folder: Path) -> None:
    async with open_engine(folder) as sampler:
        first = await sampler.generate(ask(SYSTEM, tokens=9))
        rewritten = [*SYSTEM, *first.ids[:4], (first.ids[4] + 1) % VOCABULARY, 5, 6]
        again = await sampler.generate(ask(rewritten, tokens=9))
    assert compute_largest_difference(folder, {0: [(SYSTEM, first), (rewritten, again)]}) <= 1e-4


async def test_a_stop_token_ends_the_turn_and_is_its_last_id(folder: Path) -> None:
    async with open_engine(folder) as sampler:
        free = await sampler.generate(ask(SYSTEM, tokens=20))
        stop = free.ids[6]
        stopped = await sampler.generate(ask(SYSTEM, tokens=20, stop=frozenset({stop})))
    assert stopped.finish_reason == "stop"
    assert stopped.ids == free.ids[: free.ids.index(stop) + 1]
    assert len(stopped.logprobs) == len(stopped.ids)


async def test_using_up_the_tokens_is_a_finish_by_length(folder: Path) -> None:
    async with open_engine(folder, max_model_len=80) as sampler:
        by_request = await sampler.generate(ask(SYSTEM, tokens=4))
        by_engine = await sampler.generate(ask(SYSTEM, tokens=400))
        without_room = await sampler.generate(ask([*SYSTEM, *SYSTEM], tokens=4))
    assert (by_request.finish_reason, len(by_request.ids)) == ("length", 4)
    assert (by_engine.finish_reason, len(by_engine.ids)) == ("length", 10)
    assert (without_room.finish_reason, without_room.ids, without_room.versions) == ("length", [], ())


async def test_histories_end_where_the_positions_of_the_model_end(tmp_path: Path) -> None:
    config = AutoConfig.for_model("gpt2", vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=90)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    async with open_engine(tmp_path) as sampler:
        generation = await sampler.generate(ask(SYSTEM, tokens=400))
    assert (generation.finish_reason, len(generation.ids)) == ("length", 20)
    assert compute_largest_difference(tmp_path, {0: [(SYSTEM, generation)]}) <= 1e-4


async def test_greedy_and_tempered_turns_have_the_logprobs_that_they_promise(folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    async with open_engine(folder) as sampler:
        greedy = await sampler.generate(ask(SYSTEM, temperature=0.0, tokens=10))
        tempered = await sampler.generate(ask(SYSTEM, temperature=2.5, top_p=0.7, tokens=10, seed=4))
    for generation, temperature in ((greedy, 1.0), (tempered, 2.5)):
        with torch.no_grad():
            logits = model(torch.tensor([SYSTEM + generation.ids])).logits[0, len(SYSTEM) - 1 : -1]
        chosen = (logits / temperature).log_softmax(-1).gather(1, torch.tensor(generation.ids)[:, None])[:, 0]
        assert generation.logprobs == pytest.approx(chosen.tolist(), abs=1e-4)
        assert generation is not greedy or generation.ids == logits.argmax(-1).tolist()


def test_the_engine_runs_under_trio_as_well(folder: Path) -> None:
    async def main() -> Generation:
        async with open_engine(folder) as sampler:
            return await sampler.generate(ask(SYSTEM, tokens=4))

    assert anyio.run(main, backend="trio").ids == anyio.run(main, backend="asyncio").ids


async def test_a_setting_that_the_engine_does_not_have_is_refused_and_not_left_out(folder: Path) -> None:
    async with open_engine(folder) as sampler:
        unknown: dict[str, Any] = {"presence_penalty": 0.5, "frequency_penalty": 0.5, "repetition_penalty": 1.1}
        for name, value in unknown.items():
            with pytest.raises(RequestRefused, match=f"no such setting: {name} = {value}"):
                await sampler.generate(ask(SYSTEM, **{name: value}))
