"""An environment for workers that are killed in the middle of a step: it writes down every step when it begins."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio

from fleetbus_schemas import Action, ChatMessage, Task
from fleetbus_workers.environment.base import Start, Step, Verdict

SLOW_SECONDS = 2.0


class SlowEnvironment:
    """Five steps of reward 0.5; those whose text begins with "slow" take seconds. ``task.config["marks"]`` names the file."""

    replayable = True

    async def open(self, task: Task) -> None:
        self._marks = Path(task.config["marks"])
        self._count = 0
        await anyio.lowlevel.checkpoint()

    async def reset(self) -> Start:
        await anyio.lowlevel.checkpoint()
        return Start(messages=(ChatMessage(role="user", content="begin"),))

    async def step(self, action: Action) -> Step:
        with self._marks.open("a") as file:
            file.write(action.text + "\n")
        await anyio.sleep(SLOW_SECONDS if action.text.startswith("slow") else 0)
        self._count += 1
        text = f"{self._count}: {action.text}"
        return Step(messages=(ChatMessage(role="user", content=text),), reward=0.5, terminated=self._count >= 5)

    async def state(self) -> dict[str, Any]:
        await anyio.lowlevel.checkpoint()
        return {"count": self._count}

    async def verify(self) -> Verdict:
        await anyio.lowlevel.checkpoint()
        return Verdict(reward=0.5 * self._count)

    async def close(self) -> None:
        await anyio.lowlevel.checkpoint()
