"""An environment that counts its steps and says which one it is, for workers that are killed in the middle of one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio

from fleetbus_schemas import Action, ChatMessage, Task
from fleetbus_workers.environment.base import Start, Step, Verdict

REWARD = 0.25
STEPS = 5


class CountingEnvironment:
    """``task.config``: ``steps`` of reward `REWARD`, each of which takes ``seconds``, or two if its text begins with "slow";
    ``marks``: a file that gets the text of each when it begins."""

    replayable = True

    async def open(self, task: Task) -> None:
        self._config = task.config
        self._count = 0
        await anyio.lowlevel.checkpoint()

    async def reset(self) -> Start:
        await anyio.lowlevel.checkpoint()
        return Start(messages=(ChatMessage(role="user", content="begin"),))

    async def step(self, action: Action) -> Step:
        if "marks" in self._config:
            mark(Path(self._config["marks"]), action.text)
        await anyio.sleep(2.0 if action.text.startswith("slow") else self._config.get("seconds", 0.0))
        self._count += 1
        return Step(
            messages=(ChatMessage(role="user", content=f"{self._count}: {action.text}"),),
            reward=REWARD,
            terminated=self._count >= self._config.get("steps", STEPS),
        )

    async def state(self) -> dict[str, Any]:
        await anyio.lowlevel.checkpoint()
        return {"count": self._count}

    async def verify(self) -> Verdict:
        await anyio.lowlevel.checkpoint()
        return Verdict(reward=REWARD * self._count)

    async def close(self) -> None:
        await anyio.lowlevel.checkpoint()


def mark(path: Path, text: str) -> None:
    with path.open("a") as file:
        file.write(text + "\n")
