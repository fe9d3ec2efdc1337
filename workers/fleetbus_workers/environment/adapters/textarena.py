"""A TextArena game: for one player per episode, or for several, each a seat that the policy plays.

TextArena draws from Python's global random numbers, so a game cannot be replayed. A task's ``config``: ``id`` (instead of the
one in ``textarena:ID``), ``options`` of that game, and ``players`` (1).
"""

from __future__ import annotations

from typing import Any

import anyio
import textarena
from textarena.envs.registration import ENV_REGISTRY

from fleetbus.errors import UserError
from fleetbus_schemas import Action, ChatMessage, Task
from fleetbus_schemas.seat import MAX_SEATS
from fleetbus_workers.environment.adapter_context import AdapterContext, Factory
from fleetbus_workers.environment.base import EnvironmentFailed, Start, Step, Verdict
from fleetbus_workers.environment.task_permissions import check_arguments


def build(context: AdapterContext) -> Factory:
    """Games of the spec's id, else of the task's. Raises `UserError` if there is no such game."""
    id = context.rest
    if id and id not in ENV_REGISTRY:
        raise UserError(f"environment {context.spec!r}: TextArena has no game {id!r}")
    return Factory(lambda: TextArenaEnvironment(id))


class TextArenaEnvironment:
    """One game. Every action's whole text is a move; the game itself reports invalid ones."""

    replayable = False

    def __init__(self, id: str) -> None:
        self._id = id
        self._over = False
        self._seen: dict[int, str] = {}

    async def open(self, task: Task) -> None:
        id = task.config.get("id") or self._id
        if id not in ENV_REGISTRY:
            raise EnvironmentFailed(f"TextArena has no game {str(id)[:80]!r}")
        self._players = task.config.get("players", 1)
        if type(self._players) is not int or not 1 <= self._players <= MAX_SEATS:
            raise EnvironmentFailed(f"config.players must be a whole number from 1 to {MAX_SEATS}")
        options = check_arguments(task.config.get("options", {}), "options")
        self._task = task
        self._game = await anyio.to_thread.run_sync(lambda: textarena.make(id, **options))

    async def reset(self) -> Start:
        try:
            self._game.reset(num_players=self._players, seed=self._task.seed)
        except AssertionError as error:  # how games say that they are for another number of players
            raise EnvironmentFailed(f"{error} (config.players of the task)") from error
        message, seat = self._show()
        return Start(messages=(message,), seat=seat)

    async def step(self, action: Action) -> Step:
        self._over, _ = self._game.step(action.text)
        if self._over:
            return Step(terminated=True)
        message, seat = self._show()
        return Step(messages=(message,), seat=seat)

    def _show(self) -> tuple[ChatMessage, str]:
        """The text that the player whose move it is has not seen yet, after the task's prompt at first, and their seat. The
        game always returns its whole text."""
        player, text = self._game.get_observation()
        before, seen = self._seen.get(player), str(text).strip()
        self._seen[player] = seen
        if before is None:
            shown = "\n\n".join(filter(None, (self._task.prompt, seen)))
        else:
            shown = seen.removeprefix(before).strip() or seen
        return ChatMessage(role="user", content=shown), self._name(player)

    def _name(self, player: int) -> str:
        return f"player-{player}" if self._players > 1 else ""

    async def state(self) -> dict[str, Any]:
        return {"over": self._over}

    async def verify(self) -> Verdict:
        """The game's reward, with several players that of the first and of each seat; none for a game that is not over."""
        rewards, _ = self._game.close()
        if not rewards:
            return Verdict(reward=None, reason="the game was not over")
        seats = {self._name(player): float(reward) for player, reward in rewards.items()} if self._players > 1 else {}
        return Verdict(reward=float(rewards[0]), seats=seats)

    async def close(self) -> None:
        await anyio.lowlevel.checkpoint()
