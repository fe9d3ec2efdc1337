"""Choosing tokens: frequencies over an even grid of uniform numbers are the probabilities, as closed forms give them."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode

from fleetbus_schemas import SamplingSettings
from fleetbus_workers.inference.torch.sampling import UNIFORM_BITS, sample_tokens

GRID = 2000
PROBABILITIES = torch.tensor([0.05, 0.4, 0.0, 0.25, 0.2, 0.1])


def frequencies(probabilities: torch.Tensor = PROBABILITIES, **settings: Any) -> torch.Tensor:
    """How often each token is chosen when the uniform number runs over an even grid."""
    logits = (probabilities.log() + 3.0).expand(GRID, -1).contiguous()
    uniforms = ((np.arange(GRID) + 0.5) / GRID).astype(np.float32)
    ids, _ = sample_tokens(logits, uniforms, [SamplingSettings(**settings)] * GRID)
    counts = Counter(ids)
    return torch.tensor([counts[token] / GRID for token in range(len(probabilities))])


def assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert torch.allclose(found, expected / expected.sum(), atol=1.5 / GRID), found


def test_tokens_are_as_frequent_as_they_are_probable() -> None:
    assert_close(frequencies(), PROBABILITIES)


@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_temperature_raises_probabilities_to_its_inverse(temperature: float) -> None:
    assert_close(frequencies(temperature=temperature), PROBABILITIES ** (1 / temperature))


@pytest.mark.parametrize(
    ("top_p", "nucleus"), [(0.3, [1]), (0.5, [1, 3]), (0.65, [1, 3]), (0.7, [1, 3, 4]), (0.99, [0, 1, 3, 4, 5])]
)
def test_top_p_keeps_the_smallest_set_that_reaches_it(top_p: float, nucleus: list[int]) -> None:
    kept = torch.zeros_like(PROBABILITIES)
    kept[nucleus] = PROBABILITIES[nucleus]
    assert_close(frequencies(top_p=top_p), kept)


@pytest.mark.parametrize(("top_k", "kept"), [(1, [1]), (2, [1, 3]), (4, [1, 3, 4, 5]), (100, [0, 1, 3, 4, 5])])
def test_top_k_keeps_the_likeliest(top_k: int, kept: list[int]) -> None:
    expected = torch.zeros_like(PROBABILITIES)
    expected[kept] = PROBABILITIES[kept]
    assert_close(frequencies(top_k=top_k), expected)


@pytest.mark.parametrize(("min_p", "kept"), [(0.2, [1, 3, 4, 5]), (0.5, [1, 3, 4]), (0.6, [1, 3]), (1.0, [1])])
def test_min_p_keeps_what_is_likely_beside_the_likeliest(min_p: float, kept: list[int]) -> None:
    expected = torch.zeros_like(PROBABILITIES)
    expected[kept] = PROBABILITIES[kept]
    assert_close(frequencies(min_p=min_p), expected)


def test_top_p_counts_what_top_k_and_min_p_leave() -> None:
    assert_close(frequencies(top_k=2, top_p=0.6), torch.tensor([0.0, 1.0, 0.0, 0.0, 0.0, 0.0]))
    assert_close(frequencies(top_k=2, top_p=0.7), torch.tensor([0.0, 0.4, 0.0, 0.25, 0.0, 0.0]))


def test_a_vanishing_top_p_is_greedy() -> None:
    assert_close(frequencies(top_p=1e-9), torch.tensor([0.0, 1.0, 0.0, 0.0, 0.0, 0.0]))


def test_temperature_zero_is_greedy_with_log_probabilities_at_one() -> None:
    greedy = [SamplingSettings(temperature=0.0)]
    ids, logprobs = sample_tokens(PROBABILITIES.log()[None] - 7.0, np.array([0.99], np.float32), greedy)
    assert ids == [1]
    assert logprobs == pytest.approx([np.log(0.4)], abs=1e-6)


def test_log_probabilities_are_at_the_temperature_and_before_top_p() -> None:
    tempered = [SamplingSettings(temperature=2.0, top_p=0.5)]
    ids, logprobs = sample_tokens(PROBABILITIES.log()[None], np.array([0.0], np.float32), tempered)
    assert ids == [1]
    root = PROBABILITIES.sqrt()
    assert logprobs == pytest.approx([float((root[1] / root.sum()).log())], abs=1e-6)


def test_rows_with_different_settings_do_not_touch_each_other() -> None:
    logits = torch.randn(5, 40, generator=torch.Generator().manual_seed(0))
    uniforms = np.array([0.1, 0.9, 0.5, 0.3, 0.7], np.float32)
    settings = [
        SamplingSettings(),
        SamplingSettings(temperature=0.0),
        SamplingSettings(temperature=0.7, top_p=0.4),
        SamplingSettings(top_k=3, min_p=0.1),
        SamplingSettings(temperature=1.3),
    ]
    together = sample_tokens(logits, uniforms, settings)
    for row in range(5):
        alone = sample_tokens(logits[row : row + 1], uniforms[row : row + 1], settings[row : row + 1])
        assert alone[0][0] == together[0][row]
        assert alone[1][0] == pytest.approx(together[1][row], abs=1e-6)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_turns_that_share_a_row_of_logits_choose_what_each_would_choose_alone(temperature: float) -> None:
    logits = torch.randn(3, 40, generator=torch.Generator().manual_seed(0))
    rows = np.array([0, 0, 0, 1, 2, 2])
    uniforms = np.array([0.1, 0.9, 0.5, 0.3, 0.7, 0.2], np.float32)
    settings = [
        SamplingSettings(),
        SamplingSettings(temperature=0.0),
        SamplingSettings(temperature=temperature, top_p=0.4),
        SamplingSettings(top_k=3, min_p=0.1),
        SamplingSettings(temperature=temperature),
        SamplingSettings(),
    ]
    ids, logprobs = sample_tokens(logits, uniforms, settings, rows)
    for turn, row in enumerate(rows):
        alone = sample_tokens(logits[row : row + 1], uniforms[turn : turn + 1], settings[turn : turn + 1])
        assert alone[0] == [ids[turn]]
        assert alone[1] == pytest.approx([logprobs[turn]], abs=1e-6)


class TorchCalls(TorchFunctionMode):
    """Notes each call of torch: its name, and the shape of a tensor that it returned."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[tuple[str, object]] = []

    def __torch_function__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        found = function(*arguments, **options or {})
        self.made.append((function.__name__, tuple(found.shape) if isinstance(found, torch.Tensor) else None))
        return found


def trace_sampling(turns: int, **settings: Any) -> list[tuple[str, object]]:
    logits = torch.zeros(turns, 5)
    with TorchCalls() as calls:
        sample_tokens(logits, np.zeros(turns, np.float32), [SamplingSettings(**settings)] * turns)
    return calls.made


def test_no_turn_brings_its_number_to_the_device_alone() -> None:
    brought = [sum(name == "to" for name, _ in trace_sampling(turns, top_p=0.5)) for turns in (1, 8)]
    assert brought[0] == brought[1] > 0


def test_rows_of_one_turn_each_are_not_copied_for_its_temperature() -> None:
    """A copy of 512 rows of a vocabulary of 152,000 is 300 MB."""
    made = trace_sampling(8, temperature=0.7)
    assert ("mul", (8, 5)) in made
    assert ("__getitem__", (8, 5)) not in made


@pytest.mark.parametrize("extreme", [0, (1 << UNIFORM_BITS) - 1])
def test_the_ends_of_the_range_never_choose_an_impossible_token(extreme: int) -> None:
    generator = torch.Generator().manual_seed(1)
    probabilities = torch.rand(500, 300, generator=generator)
    probabilities[:, :7] = 0.0
    probabilities[:, -7:] = 0.0
    uniforms = np.full(500, extreme / (1 << UNIFORM_BITS), np.float32)
    ids, logprobs = sample_tokens(probabilities.log(), uniforms, [SamplingSettings()] * 500)
    assert np.isfinite(logprobs).all()
    assert set(ids) == {7} if extreme == 0 else min(ids) >= 7


def test_logits_that_are_no_numbers_give_a_log_probability_that_shows_it() -> None:
    ids, logprobs = sample_tokens(torch.full((1, 4), torch.nan), np.array([0.5], np.float32), [SamplingSettings()])
    assert 0 <= ids[0] < 4
    assert np.isnan(logprobs[0])
