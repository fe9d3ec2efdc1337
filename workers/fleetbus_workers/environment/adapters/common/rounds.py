"""Rounds of a game: the turns of all who move at once, told ahead so that they are sampled side by side, or that of one."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping
from typing import Any

from fleetbus_schemas import ChatMessage
from fleetbus_workers.environment.adapters.common.legal_moves import TRIES
from fleetbus_workers.environment.base import Ahead, Start, Step


class Rounds:
    """Of one game. A player whose answer was no legal move is asked again after the others, and has lost after `TRIES` such
    answers in a row. ``seats``: each player is a seat of its own, by its name."""

    def __init__(self, *, seats: bool) -> None:
        self.chosen: dict[str, Any] = {}
        """By player of the round, in their order, once all have answered."""
        self.loser = ""
        """The player that gave too many answers that are no legal move."""
        self._seats = seats
        self._waiting: deque[str] = deque()
        self._shown: dict[str, ChatMessage] = {}
        self._wrong: Counter[str] = Counter()

    @property
    def player(self) -> str:
        """The one that is asked now."""
        return self._waiting[0]

    def start(self, shown: Mapping[str, ChatMessage]) -> Start:
        """Begin the first round: what each of its players is shown, in their order."""
        step = self.begin(shown)
        return Start(messages=step.messages, seat=step.seat, ahead=step.ahead)

    def begin(self, shown: Mapping[str, ChatMessage]) -> Step:
        """Begin a further round."""
        self.chosen = dict.fromkeys(shown)
        self._shown = dict(shown)
        self._waiting.extend(shown)
        first, *others = shown
        return self._ask(first, *others)

    def answer(self, chosen: Any, refuse: Callable[[int], ChatMessage]) -> Step | None:
        """``chosen``: by the player, None if it is no legal move: ``refuse`` then gives what it is shown, by the tries that it
        has left. Returns the next turn of the round, or the end by a lost game; None when all have chosen."""
        player = self._waiting.popleft()
        if chosen is not None:
            self._wrong[player] = 0
            self.chosen[player] = chosen
            return self._ask(self.player) if self._waiting else None
        self._wrong[player] += 1
        if self._wrong[player] == TRIES:
            self.loser = player
            return Step(terminated=True, tool_errors=1)
        self._shown[player] = refuse(TRIES - self._wrong[player])
        self._waiting.append(player)
        if self.player == player:
            return Step(messages=(self._shown[player],), tool_errors=1)
        step = self._ask(self.player, player)
        return Step(messages=step.messages, seat=step.seat, ahead=step.ahead, tool_errors=1)

    def _ask(self, player: str, *ahead: str) -> Step:
        told = tuple(Ahead(messages=(self._shown[each],), seat=self._name(each)) for each in ahead)
        return Step(messages=(self._shown[player],), seat=self._name(player), ahead=told)

    def _name(self, player: str) -> str:
        return player if self._seats else ""
