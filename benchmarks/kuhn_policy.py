"""A policy's play of Kuhn poker read exactly from a model, and how much a best response wins against it.

Below is the game of `docs/examples/kuhn.py`. An answer is one token, and every token is a move, so that no answer is outside
the rules: the probability of a bet is that of all tokens that the game takes for one. What the first player does in its
second turn depends on the token with which it passed; it is the mean over all of these, weighted by how likely each was: the
behaviour strategy that plays the same game (Kuhn's theorem).
"""

from __future__ import annotations

import itertools
import runpy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from fleetbus_schemas import ChatMessage
from fleetbus_workers.inference.chat_template import ChatTemplate

EXAMPLE = Path(__file__).resolve().parent.parent / "docs" / "examples" / "kuhn.py"
GAME = runpy.run_path(str(EXAMPLE), run_name="kuhn")
CARDS: str = GAME["CARDS"]
DEALS: Sequence[str] = GAME["DEALS"]
settle = GAME["settle"]
VALUE = -1 / 18
"""What the first player wins of a game between two perfect players (Kuhn, 1950)."""

TURNS = ("", "p", "b", "pb")
"""The moves after which somebody is asked; in turn the first, the second, the second and the first player."""

ROWS = 512

Play = Mapping[tuple[str, str], float]
"""The probability of a bet by (own card, moves so far): 12 information sets."""


class Gains(NamedTuple):
    """``first`` and ``second``: what a best response against the policy in the other seat wins more than the game is worth to
    its seat. ``value``: what the first seat wins if the policy plays both."""

    first: float
    second: float
    value: float

    @property
    def exploitability(self) -> float:
        """The mean of both gains, NashConv by the number of players, as OpenSpiel has it; 0 for an equilibrium."""
        return (self.first + self.second) / 2


class Prompts:
    """What a policy is shown in each information set, as token ids, and the move that each token is. ``temperature`` is that at
    which it plays."""

    def __init__(self, folder: Path, vocabulary: int, temperature: float = 1.0) -> None:
        self.temperature = temperature
        template = ChatTemplate(folder)
        self._template = template
        self._game = GAME["Kuhn"]()
        texts = [template.decode_text([token]) for token in range(vocabulary)]
        self.bets: NDArray[np.bool_] = np.array([GAME["read_move"](text) == "b" for text in texts])
        self.first = {
            (card, moves): template.encode_prompt([self._show(card, moves)], ()) for card in CARDS for moves in TURNS[:3]
        }

    def again(self, card: str, token: int) -> list[int]:
        """The first player's second turn, after it passed with ``token``."""
        between = self._template.encode_continuation([token], [self._show(card, "pb")])
        return [*self.first[card, ""], token, *between]

    def _show(self, card: str, moves: str) -> ChatMessage:
        other = next(each for each in CARDS if each != card)
        self._game.deal = card + other if len(moves) % 2 == 0 else other + card
        self._game.moves = moves
        shown: ChatMessage = self._game.show()
        return shown


@torch.no_grad()
def compute_next(model: torch.nn.Module, rows: Sequence[Sequence[int]], temperature: float = 1.0) -> NDArray[np.float64]:
    """Probabilities of the next token [N, vocabulary] after ``rows`` of any lengths."""
    found = np.zeros((len(rows), 0))
    for length in sorted({len(row) for row in rows}):
        places = [place for place, row in enumerate(rows) if len(row) == length]
        for start in range(0, len(places), ROWS):
            part = places[start : start + ROWS]
            ids = torch.tensor([list(rows[place]) for place in part])
            logits = model(input_ids=ids, use_cache=False, logits_to_keep=1).logits[:, -1]
            if not found.shape[1]:
                found = np.zeros((len(rows), logits.shape[-1]))
            found[part] = torch.softmax(logits.double() / temperature, -1).numpy()
    return found


def read_play(model: torch.nn.Module, prompts: Prompts) -> dict[tuple[str, str], float]:
    """How a model plays."""
    known = list(prompts.first)
    first = dict(zip(known, compute_next(model, [prompts.first[each] for each in known], prompts.temperature), strict=True))
    play = {each: float(probabilities @ prompts.bets) for each, probabilities in first.items()}
    passing = np.flatnonzero(~prompts.bets)
    for card in CARDS:
        weights = first[card, ""][passing]
        rows = [prompts.again(card, int(token)) for token in passing]
        bets = compute_next(model, rows, prompts.temperature) @ prompts.bets
        play[card, "pb"] = float(weights @ bets / weights.sum())
    return play


def measure_gains(play: Play) -> Gains:
    """Both best responses, by trying all plans of each card; exact."""
    first, second = (_find_best(play, seat) for seat in (0, 1))
    return Gains(first - VALUE, second + VALUE, compute_value(play))


def compute_value(play: Play, deals: Sequence[str] = DEALS) -> float:
    """What the first player wins of a game on the mean, if ``deals`` are equally likely."""

    def expect(deal: str, moves: str) -> float:
        won = settle(deal, moves)
        if won is not None:
            return float(won)
        bet = play[deal[len(moves) % 2], moves]
        return bet * expect(deal, moves + "b") + (1 - bet) * expect(deal, moves + "p")

    return sum(expect(deal, "") for deal in deals) / len(deals)


def _find_best(play: Play, seat: int) -> float:
    """The most that a player in ``seat`` can win of a game whose other seat plays ``play``."""
    own = [moves for moves in TURNS if len(moves) % 2 == seat]
    sign = 1 if seat == 0 else -1
    total = 0.0
    for card in CARDS:
        deals = [deal for deal in DEALS if deal[seat] == card]
        plans = itertools.product((0.0, 1.0), repeat=len(own))
        changed = ({**play, **{(card, moves): bet for moves, bet in zip(own, plan, strict=True)}} for plan in plans)
        total += max(sign * compute_value(each, deals) for each in changed) * len(deals) / len(DEALS)
    return total
