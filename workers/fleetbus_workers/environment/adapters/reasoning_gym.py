"""One question of a reasoning-gym dataset per episode: made from the task's seed, answered once, scored by the dataset.

A task's ``config``: ``dataset`` (instead of the one in ``reasoning-gym:DATASET``), and ``options`` of that dataset.
"""

from __future__ import annotations

from typing import Any

import anyio
import reasoning_gym
from reasoning_gym.factory import DATASETS

from fleetbus.errors import UserError
from fleetbus_schemas import Action, ChatMessage, Task
from fleetbus_workers.environment.adapter_context import AdapterContext, Factory
from fleetbus_workers.environment.adapters.common.action_text import extract_action
from fleetbus_workers.environment.adapters.common.task_seed import find_seed
from fleetbus_workers.environment.base import Start, Step, Verdict
from fleetbus_workers.environment.task_permissions import check_arguments

ASKED = "Give the answer alone, between <answer> and </answer>."


def build(context: AdapterContext) -> Factory:
    """Environments of the spec's dataset, else of the task's. Raises `UserError` if there is no such dataset."""
    dataset = context.rest
    if dataset and dataset not in DATASETS:
        raise UserError(f"environment {context.spec!r}: reasoning-gym has no dataset {dataset!r}")
    return Factory(lambda: ReasoningGymEnvironment(dataset))


class ReasoningGymEnvironment:
    """One question, one answer."""

    replayable = True

    def __init__(self, dataset: str) -> None:
        self._dataset = dataset
        self._score = 0.0

    async def open(self, task: Task) -> None:
        name = task.config.get("dataset") or self._dataset
        seed = find_seed(task)
        options: dict[str, Any] = {"size": 1, "seed": seed, **check_arguments(task.config.get("options", {}), "options")}
        self._prompt = task.prompt
        self._questions = await anyio.to_thread.run_sync(lambda: reasoning_gym.create_dataset(name, **options))
        self._entry = await anyio.to_thread.run_sync(lambda: self._questions[0])

    async def reset(self) -> Start:
        prompt = "\n\n".join(filter(None, (self._prompt, self._entry["question"].strip(), ASKED)))
        return Start(messages=(ChatMessage(role="user", content=prompt),))

    async def step(self, action: Action) -> Step:
        answer = extract_action(action.text)
        self._score = await anyio.to_thread.run_sync(lambda: self._questions.score_answer(answer, entry=self._entry))
        return Step(reward=self._score, terminated=True)

    async def state(self) -> dict[str, Any]:
        return {"dataset": self._entry["metadata"].get("source_dataset", ""), "score": self._score}

    async def verify(self) -> Verdict:
        return Verdict(reward=self._score)

    async def close(self) -> None:
        await anyio.lowlevel.checkpoint()
