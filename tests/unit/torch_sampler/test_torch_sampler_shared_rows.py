"""Turns with the same history are one row of the engine until they draw different tokens: less is computed, nothing differs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fleetbus_workers.inference.base import Generation, GenerationRequest
from fleetbus_workers.inference.torch import TorchSampler
from fleetbus_workers.inference.torch.engine import Engine
from fleetbus_workers.inference.torch.turn import Turn
from tests.support.torch_engine import SYSTEM, ask, compute_largest_difference, draw_ids, write_model


class SteppedEngine:
    """An engine whose steps the test takes, so that turns join and leave between the ones it says."""

    def __init__(self, folder: Path, slots: int, **options: Any) -> None:
        sampler = TorchSampler(folder, slots=slots, **options)
        self.stats, self.slots = sampler._stats, slots
        self.engine = Engine(sampler._runner, sampler._prefix_cache, self.stats, version=0, threads=1, notify=lambda: None)

    def submit(self, *requests: GenerationRequest) -> list[Turn]:
        turns = [Turn(request, 4096) for request in requests]
        for turn in turns:
            self.engine.submit(turn)
        return turns

    def step(self, times: int = 1) -> None:
        with torch.inference_mode():
            for _ in range(times):
                self.engine._run_once()
                rows = self.engine._rows
                assert self.engine.count_requests()[0] == sum(map(len, rows)) and len(rows) <= self.slots

    def play(self, turns: list[Turn], between: Callable[[], None] = lambda: None) -> list[Generation]:
        while any(turn.generation is None for turn in turns):
            self.step()
            between()
        return [turn.generation for turn in turns if turn.generation is not None]


def build_group(size: int, *, tokens: int = 24, temperature: float = 0.3, ids: list[int] | None = None) -> list[Any]:
    """Turns with one prompt and a seed each; so cold that they say the same for some tokens, and so warm that they part."""
    ids = ids or [*SYSTEM, *draw_ids(3, 9)]
    return [ask(ids, seed=seed, tokens=tokens, key=f"e{seed}", temperature=temperature) for seed in range(size)]


@pytest.mark.integration
@pytest.mark.parametrize("family", ["qwen3", "gpt_neox"])
@pytest.mark.parametrize("slots", [5, 32])
def test_a_group_says_what_its_turns_say_alone_and_computes_common_tokens_once(tmp_path: Path, family: str, slots: int) -> None:
    folder = write_model(tmp_path, family)
    together = SteppedEngine(folder, slots)
    said = together.play(together.submit(*build_group(16)))
    for request, generation in zip(build_group(16), said, strict=True):
        alone = SteppedEngine(folder, 1)
        (expected,) = alone.play(alone.submit(request))
        assert generation.ids == expected.ids
        assert generation.logprobs == pytest.approx(expected.logprobs, abs=1e-4)
    assert len({tuple(generation.ids) for generation in said}) > 4, "they part"
    assert together.stats["sampled_tokens"] == 16 * 24
    assert together.stats["computed_tokens"] < 0.95 * 16 * 24
    if slots == 32:
        assert together.stats["prefill_tokens"] == len(build_group(1)[0].ids), "the prompt is computed once"


def test_turns_that_end_earlier_leave_the_others_of_their_row_as_they_are(folder: Path) -> None:
    requests = [ask([*SYSTEM, 5], seed=1, tokens=tokens, key=f"e{tokens}", temperature=0.0) for tokens in (3, 9, 1, 6)]
    stepped = SteppedEngine(folder, 8)
    said = stepped.play(stepped.submit(*requests))
    assert [len(each.ids) for each in said] == [3, 9, 1, 6]
    assert all(each.ids == said[1].ids[: len(each.ids)] for each in said)
    assert stepped.stats["computed_tokens"] == 9


@pytest.mark.integration
def test_a_second_turn_continues_from_the_history_of_a_shared_row(folder: Path) -> None:
    stepped = SteppedEngine(folder, 8)
    requests = build_group(4, tokens=6, temperature=0.0)
    first = stepped.play(stepped.submit(*requests))
    before = stepped.stats["prefill_tokens"]
    again = [[*request.ids, *said.ids, index, 7] for index, (request, said) in enumerate(zip(requests, first, strict=True))]
    second = stepped.play(stepped.submit(*[ask(ids, seed=8, key=f"e{index}") for index, ids in enumerate(again)]))
    assert stepped.stats["prefill_tokens"] - before == 4 * 3, "each has its history, and computes what came after it"
    played = {index: [(ids, said)] for index, (ids, said) in enumerate(zip(again, second, strict=True))}
    assert compute_largest_difference(folder, played) <= 1e-4


@pytest.mark.parametrize("leaver", [0, 1, 2])
def test_a_turn_that_is_abandoned_leaves_its_row_to_the_others(folder: Path, leaver: int) -> None:
    stepped = SteppedEngine(folder, 8)
    turns = stepped.submit(*build_group(3, temperature=0.0))
    stepped.step(4)
    turns[leaver].abandoned = True
    left = [turn for turn in turns if turn is not turns[leaver]]
    said = stepped.play(left)
    assert len(turns[leaver].sampled) == 4
    assert compute_largest_difference(folder, {0: [(list(left[0].ids), said[0])], 1: [(list(left[1].ids), said[1])]}) <= 1e-4
    assert stepped.engine.count_requests() == (0, 0)


def test_turns_that_come_later_do_not_join_a_row_that_has_spoken(folder: Path) -> None:
    stepped = SteppedEngine(folder, 8)
    early = stepped.submit(*build_group(2, temperature=0.0))
    stepped.step(3)
    late = stepped.submit(*build_group(2, temperature=0.0))
    said = stepped.play([*early, *late])
    assert len({tuple(each.ids) for each in said}) == 1
    assert stepped.stats["computed_tokens"] == 2 * 24
