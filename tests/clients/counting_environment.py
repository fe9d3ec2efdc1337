"""An environment whose every step takes a moment and says which one it is, so that kills hit steps in the middle."""

from __future__ import annotations

from typing import Any

import anyio

from fleetbus_schemas import Action, ChatMessage, Task
from fleetbus_workers.environment.base import Start, Step, Verdict

STEP_SECONDS = 0.15
REWARD = 0.25


class CountingEnvironment:
    """``task.config["steps"]`` steps of reward `REWARD` each."""

    replayable = True

    async def open(self, task: Task) -> None:
        self._steps = int(task.config["steps"])
        self._count = 0
        await anyio.lowlevel.checkpoint()

    async def reset(self) -> Start:
        await anyio.lowlevel.checkpoint()
        return Start(messages=(ChatMessage(role="user", content="begin"),))

    async def step(self, action: Action) -> Step:
        self._count += 1
        await anyio.sleep(STEP_SECONDS)
        text = f"{self._count}: {action.text}"
        return Step(messages=(ChatMessage(role="user", content=text),), reward=REWARD, terminated=self._count >= self._steps)

    async def state(self) -> dict[str, Any]:
        await anyio.lowlevel.checkpoint()
        return {"count": self._count}

    async def verify(self) -> Verdict:
        await anyio.lowlevel.checkpoint()
        return Verdict(reward=REWARD * self._count)

    async def close(self) -> None:
        await anyio.lowlevel.checkpoint()
