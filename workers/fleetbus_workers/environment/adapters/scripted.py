"""An environment with nothing outside: a fixed number of turns, each answered at once. For benchmarks and simulations."""

from __future__ import annotations

from typing import Any

import anyio

from fleetbus.errors import UserError
from fleetbus_schemas import Action, ChatMessage, Task
from fleetbus_workers.environment.adapter_context import AdapterContext, Factory
from fleetbus_workers.environment.base import Start, Step, Verdict


def build(context: AdapterContext) -> Factory:
    """Environments of as many turns as the spec says, else of 3. Raises `UserError`."""
    turns = context.rest
    if turns and not (turns.isdecimal() and int(turns) > 0):
        raise UserError(f"environment {context.spec!r}: the number of turns must be 1 or more, as in scripted:3")
    return Factory(lambda: ScriptedEnvironment(int(turns or 3)))


class ScriptedEnvironment:
    """Says ``turn N`` until ``turns`` actions were made (a task's config may say how many), and gives every episode 1."""

    replayable = True

    def __init__(self, turns: int = 3) -> None:
        self._turns = turns
        self._played = 0

    async def open(self, task: Task) -> None:
        self._turns = int(task.config.get("turns", self._turns))
        self._prompt = task.prompt
        await anyio.lowlevel.checkpoint()

    async def reset(self) -> Start:
        await anyio.lowlevel.checkpoint()
        return Start(messages=(ChatMessage(role="user", content=self._prompt or "turn 0"),))

    async def step(self, action: Action) -> Step:
        await anyio.lowlevel.checkpoint()
        self._played += 1
        if self._played >= self._turns:
            return Step(terminated=True)
        return Step(messages=(ChatMessage(role="user", content=f"turn {self._played}"),))

    async def state(self) -> dict[str, Any]:
        return {"played": self._played, "turns": self._turns}

    async def verify(self) -> Verdict:
        await anyio.lowlevel.checkpoint()
        return Verdict(reward=1.0)

    async def close(self) -> None:
        await anyio.lowlevel.checkpoint()
