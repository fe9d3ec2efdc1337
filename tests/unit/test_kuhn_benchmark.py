"""The exact reading of Kuhn poker that its benchmark is measured by: known strategies have their known exploitability."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks.kuhn_policy import CARDS, TURNS, VALUE, Prompts, compute_next, measure_gains, read_play
from fleetbus_workers.starter.build import find_starter_folder


def build_equilibrium(bluff: float) -> dict[tuple[str, str], float]:
    """Kuhn's family of equilibria (Kuhn, 1950), by how often the first player bluffs with a jack, 0 to 1/3."""
    return {
        ("J", ""): bluff, ("Q", ""): 0.0, ("K", ""): 3 * bluff,
        ("J", "pb"): 0.0, ("Q", "pb"): bluff + 1 / 3, ("K", "pb"): 1.0,
        ("J", "p"): 1 / 3, ("Q", "p"): 0.0, ("K", "p"): 1.0,
        ("J", "b"): 0.0, ("Q", "b"): 1 / 3, ("K", "b"): 1.0,
    }  # fmt: skip


@pytest.mark.parametrize("bluff", [0.0, 0.2, 1 / 3])
def test_nothing_is_won_against_an_equilibrium(bluff: float) -> None:
    gains = measure_gains(build_equilibrium(bluff))

    assert gains == pytest.approx((0.0, 0.0, VALUE), abs=1e-12)


def test_who_always_passes_loses_a_chip_less_the_value_and_random_play_what_openspiel_says() -> None:
    always = {(card, moves): 0.0 for card in CARDS for moves in TURNS}
    assert measure_gains(always) == pytest.approx((1 - VALUE, 1 + VALUE, 0.0))
    uniform = dict.fromkeys(always, 0.5)
    assert measure_gains(uniform).exploitability == pytest.approx(11 / 24), "OpenSpiel's for the uniform policy: .458333"


def test_a_queen_that_always_calls_gives_away_what_a_king_gets_of_it() -> None:
    play = build_equilibrium(0.0) | {("Q", "b"): 1.0}

    # A king that bets now wins 2 chips of a queen and 1 of a jack, 3 in two deals of six, where it could get 7/3 before.
    assert measure_gains(play) == pytest.approx(((3 - 7 / 3) / 6, 0.0, VALUE))


@pytest.mark.integration
def test_the_play_of_a_model_is_that_of_its_tokens() -> None:
    folder = find_starter_folder()
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    prompts = Prompts(folder, model.get_input_embeddings().weight.shape[0])
    play = read_play(model, prompts)
    assert set(play) == {(card, moves) for card in CARDS for moves in TURNS}

    drawn = torch.Generator().manual_seed(1)
    first = torch.tensor(compute_next(model, [prompts.first["Q", ""]])[0])
    tokens = torch.multinomial(first, 4000, replacement=True, generator=drawn).numpy()
    passed = tokens[~prompts.bets[tokens]]
    assert 1 - len(passed) / len(tokens) == pytest.approx(play["Q", ""], abs=0.03)
    kinds, counts = np.unique(passed, return_counts=True)
    bets = compute_next(model, [prompts.again("Q", int(token)) for token in kinds]) @ prompts.bets
    assert bets @ counts / counts.sum() == pytest.approx(play["Q", "pb"], abs=0.01)
