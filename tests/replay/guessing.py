"""An environment of a user's own, as small as can be: guess a word in three turns; every guess shows what it was worth."""

from __future__ import annotations

import hashlib
from typing import Any

from fleetbus_schemas import Action, ChatMessage, Task
from fleetbus_workers.environment.base import Start, Step, Verdict


class Guessing:
    """A guess is worth how early its hash comes: random policies earn something, and not all the same."""

    replayable = True
    turns = 2
    answer = "worth {worth}"

    async def open(self, task: Task) -> None:
        self._task = task
        self._worth: list[int] = []

    async def reset(self) -> Start:
        return Start(messages=(ChatMessage(role="user", content=self._task.prompt),))

    async def step(self, action: Action) -> Step:
        digest = hashlib.blake2b(f"{self._task.key}/{action.text}".encode(), digest_size=1).digest()
        self._worth.append(digest[0] % 4)
        if len(self._worth) == self.turns:
            return Step(terminated=True)
        return Step(messages=(ChatMessage(role="user", content=self.answer.format(worth=self._worth[-1])),))

    async def state(self) -> dict[str, Any]:
        return {"worth": self._worth}

    async def verify(self) -> Verdict:
        return Verdict(reward=max(self._worth) / 3)

    async def close(self) -> None:
        return
