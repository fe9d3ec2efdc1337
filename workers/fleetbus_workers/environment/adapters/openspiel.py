"""A game of OpenSpiel, by its own API: each player is a seat, chance is drawn from the task's seed.

A task's ``config``: ``id`` (instead of the one in ``openspiel:ID``), as OpenSpiel writes games: ``kuhn_poker(players=3)``.
Players who move at once answer one after another, and none sees the moves of the others.
"""

from __future__ import annotations

import random
import re
from typing import Any

import anyio
import pyspiel

from fleetbus.errors import UserError
from fleetbus_schemas import Action, ChatMessage, Task
from fleetbus_schemas.seat import MAX_SEATS
from fleetbus_workers.environment.adapter_context import AdapterContext, Factory
from fleetbus_workers.environment.adapters.common.legal_moves import TRIES, find_move, list_moves, refuse
from fleetbus_workers.environment.adapters.common.rounds import Rounds
from fleetbus_workers.environment.adapters.common.task_seed import find_seed
from fleetbus_workers.environment.base import EnvironmentFailed, Start, Step, Verdict

_OF_TASK = re.compile(r"\w{1,80}(\((\w{1,80}=(-?\d{1,3}(\.\d{1,9})?|True|true|False|false)(,|(?=\)))){0,20}\))?", re.ASCII)
"""A task names no game by a text, for some read a file that it names, and none of a size that nobody can hold."""


def build(context: AdapterContext) -> Factory:
    """Games of the spec's id, else of the task's. Raises `UserError` if there is no such game that can be played in words."""
    id = context.rest
    if id:
        try:
            load_game(id)
        except ValueError as error:
            raise UserError(f"environment {context.spec!r}: {error}") from error
    return Factory(lambda: OpenSpielEnvironment(id))


def load_game(id: str) -> Any:
    """The game of OpenSpiel that ``id`` writes. Raises `ValueError`."""
    name = id.partition("(")[0]
    if name not in pyspiel.registered_names():
        raise ValueError(f"OpenSpiel has no game {name[:80]!r}")
    try:
        game = pyspiel.load_game(id)
    except pyspiel.SpielError as error:
        raise ValueError(f"OpenSpiel: {str(error).splitlines()[0][:300]}") from error
    kind = game.get_type()
    if game.num_players() > MAX_SEATS:
        raise ValueError(f"{name} has {game.num_players()} players; an episode has at most {MAX_SEATS} seats")
    if kind.dynamics == pyspiel.GameType.Dynamics.MEAN_FIELD:
        raise ValueError(f"{name} is a mean field game, which has no players to give seats to")
    if not (kind.provides_information_state_string or kind.provides_observation_string):
        raise ValueError(f"{name} has no text for its players")
    return game


class OpenSpielEnvironment:
    """One game. After `TRIES` answers in a row that are no legal move a seat has lost: the least that the game pays."""

    replayable = True

    def __init__(self, id: str) -> None:
        self._id = id
        self._lost = ""
        self._met: set[int] = set()
        self._legal: dict[str, dict[int, str]] = {}

    async def open(self, task: Task) -> None:
        self._task = task
        chosen = task.config.get("id")
        if chosen and not _OF_TASK.fullmatch(str(chosen)):
            raise EnvironmentFailed(
                f"the task's config has the id {str(chosen)[:80]!r}: parameters of a game are numbers, true or false"
            )
        id = str(chosen or self._id)
        try:
            self._game = await anyio.to_thread.run_sync(load_game, id)
        except ValueError as error:
            raise EnvironmentFailed(str(error)) from error
        self._players = tuple(f"player_{number}" for number in range(self._game.num_players()))

    async def reset(self) -> Start:
        self._state = self._game.new_initial_state()
        self._rounds = Rounds(seats=len(self._players) > 1)
        seed = find_seed(self._task)
        self._random = random.Random(seed)
        await anyio.lowlevel.checkpoint()
        return self._rounds.start(self._show_round())

    async def step(self, action: Action) -> Step:
        await anyio.lowlevel.checkpoint()
        rounds, player = self._rounds, self._rounds.player
        legal = self._legal[player]
        step = rounds.answer(find_move(action.text, legal), lambda left: refuse(action.text, left, list_moves(legal)))
        if rounds.loser:
            self._lost = f"{player if len(self._players) > 1 else 'the player'} gave {TRIES} answers that are no legal move"
        if step is not None:
            return step
        self._play(rounds.chosen)
        shown = self._show_round()
        return rounds.begin(shown) if shown else Step(terminated=True)

    def _play(self, chosen: dict[str, int]) -> None:
        if self._state.is_simultaneous_node():  # OpenSpiel reads no move of a player who has none
            self._state.apply_actions([chosen.get(player, 0) for player in self._players])
        else:
            self._state.apply_action(*chosen.values())

    def _show_round(self) -> dict[str, ChatMessage]:
        """Draw what is chance. Returns what each of those sees that move next: none at the end."""
        while self._state.is_chance_node():
            outcomes, weights = zip(*self._state.chance_outcomes(), strict=True)
            self._state.apply_action(self._random.choices(outcomes, weights)[0])
        if self._state.is_terminal():
            return {}
        asked = range(len(self._players)) if self._state.is_simultaneous_node() else (self._state.current_player(),)
        moving = [player for player in asked if self._state.legal_actions(player)]
        if not moving:
            raise EnvironmentFailed(f"{self._game}: nobody has a legal move")
        for player in moving:
            moves = self._state.legal_actions(player)
            self._legal[self._players[player]] = {move: self._state.action_to_string(player, move) for move in moves}
        return {self._players[player]: self._show(player) for player in moving}

    def _show(self, player: int) -> ChatMessage:
        """The knowledge of a player: all of the past where something is hidden, else the board."""
        kind = self._game.get_type()
        hidden = kind.information != pyspiel.GameType.Information.PERFECT_INFORMATION
        past = kind.provides_information_state_string and (hidden or not kind.provides_observation_string)
        text = (self._state.information_state_string if past else self._state.observation_string)(player)
        first = player not in self._met
        self._met.add(player)
        before = (self._task.prompt, f"{kind.long_name}. You are player {player}.") if first else ()
        moves = list_moves(self._legal[self._players[player]])
        return ChatMessage(role="user", content="\n\n".join(filter(None, (*before, text.strip(), moves))))

    async def state(self) -> dict[str, Any]:
        return {"game": str(self._game), "moves": len(self._state.history()), "over": self._state.is_terminal()}

    async def verify(self) -> Verdict:
        """The game's returns, with several players that of the first and of each seat; none for a game that is not over."""
        if not self._state.is_terminal() and not self._lost:
            return Verdict(reward=None, reason="the game was not over")
        rewards = [float(each) for each in self._state.returns()]
        if self._lost:
            rewards[self._players.index(self._rounds.loser)] = float(self._game.min_utility())
        seats = dict(zip(self._players, rewards, strict=True)) if len(rewards) > 1 else {}
        return Verdict(reward=rewards[0], reason=self._lost, seats=seats)

    async def close(self) -> None:
        await anyio.lowlevel.checkpoint()
