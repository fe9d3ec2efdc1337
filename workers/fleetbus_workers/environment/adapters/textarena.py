"""A TextArena game for one player per episode.

TextArena draws from Python's global random numbers, so a game cannot be replayed. A task's ``config``: ``id`` (instead of the
one in ``textarena:ID``), and ``options`` of that game.
"""

from __future__ import annotations

from typing import Any

import anyio
import textarena
from textarena.envs.registration import ENV_REGISTRY

from fleetbus.errors import UserError
from fleetbus_schemas import Action, ChatMessage, Task
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

    async def open(self, task: Task) -> None:
        id = task.config.get("id") or self._id
        if id not in ENV_REGISTRY:
            raise EnvironmentFailed(f"TextArena has no game {str(id)[:80]!r}")
        options = check_arguments(task.config.get("options", {}), "options")
        self._task = task
        self._game = await anyio.to_thread.run_sync(lambda: textarena.make(id, **options))

    async def reset(self) -> Start:
        self._game.reset(num_players=1, seed=self._task.seed)
        self._seen = self._observation()
        prompt = "\n\n".join(filter(None, (self._task.prompt, self._seen)))
        return Start(messages=(ChatMessage(role="user", content=prompt),))

    async def step(self, action: Action) -> Step:
        self._over, _ = self._game.step(action.text)
        if self._over:
            return Step(terminated=True)
        return Step(messages=(ChatMessage(role="user", content=self._read_new_text()),))

    def _observation(self) -> str:
        _, text = self._game.get_observation()
        return str(text).strip()

    def _read_new_text(self) -> str:
        """The text of the game since the last turn; the game always returns its whole text."""
        before, self._seen = self._seen, self._observation()
        return self._seen.removeprefix(before).strip() or self._seen

    async def state(self) -> dict[str, Any]:
        return {"over": self._over}

    async def verify(self) -> Verdict:
        """The game's reward; none for a game that is not over."""
        rewards, _ = self._game.close()
        if not rewards:
            return Verdict(reward=None, reason="the game was not over")
        return Verdict(reward=float(rewards[0]))

    async def close(self) -> None:
        await anyio.lowlevel.checkpoint()
