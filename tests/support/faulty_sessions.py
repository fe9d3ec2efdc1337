"""Episodes whose environment or engine makes trouble, on virtual time, and what has to be left of them."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import anyio

from fleetbus.concurrency.task_pool import TaskPool
from fleetbus.config.settings import EnvironmentSettings, LimitSettings
from fleetbus_schemas import Action, EpisodeFinished, Task
from fleetbus_workers.environment.adapters.scripted import ScriptedEnvironment
from fleetbus_workers.environment.base import Start, Step, Verdict
from fleetbus_workers.inference.base import GenerationRequest
from fleetbus_workers.inference.scripted import ScriptedSampler
from tests.support.small_deployment import LIMITS, SmallDeployment, build_configuration, small_deployment

Trouble = Callable[[], Awaitable[Any]]
"""What happens in a stage instead of the usual; None as its value: the usual after all."""


BEFORE_THE_VERDICT = ("open", "reset", "step")


async def hang() -> None:
    await anyio.sleep_forever()


def make_raising(error: Exception) -> Trouble:
    async def trouble() -> None:
        await anyio.lowlevel.checkpoint()
        raise error

    return trouble


def make_returning(value: Any) -> Trouble:
    async def trouble() -> Any:
        await anyio.lowlevel.checkpoint()
        return value

    return trouble


def make_sleeping(seconds: float) -> Trouble:
    async def trouble() -> None:
        await anyio.sleep(seconds)

    return trouble


class FaultyStages:
    """Where the environments of one test play: the trouble by stage, and what was opened and closed."""

    def __init__(self, **trouble: Trouble) -> None:
        self.trouble = trouble
        self.entered: list[str] = []
        self.begun = anyio.Event()
        self.opened = self.closed = 0

    def __call__(self) -> FaultyEnvironment:
        return FaultyEnvironment(self)

    async def enter(self, name: str) -> Any:
        """The stage's trouble, if any; ``begun`` tells that it has begun."""
        self.entered.append(name)
        if name in self.trouble:
            self.begun.set()
            return await self.trouble[name]()
        return None


class FaultyEnvironment(ScriptedEnvironment):
    """Three turns, with trouble in some stages."""

    def __init__(self, stage: FaultyStages) -> None:
        super().__init__()
        self._stage = stage

    async def open(self, task: Task) -> None:
        self._stage.opened += 1
        await super().open(task)
        await self._stage.enter("open")

    async def reset(self) -> Start:
        given = await self._stage.enter("reset")
        return given if given is not None else await super().reset()

    async def step(self, action: Action) -> Step:
        given = await self._stage.enter("step")
        return given if given is not None else await super().step(action)

    async def verify(self) -> Verdict:
        given = await self._stage.enter("verify")
        return given if given is not None else await super().verify()

    async def close(self) -> None:
        self._stage.closed += 1
        await self._stage.enter("close")


class StuckOnce(ScriptedSampler):
    """Never answers its first request; counts what it was asked."""

    def __init__(self) -> None:
        super().__init__(delay=self._delayed)
        self.asked = 0

    def _delayed(self, request: GenerationRequest) -> float:
        self.asked += 1
        return math.inf if self.asked == 1 else 0.0


@asynccontextmanager
async def start_deployment(
    stage: FaultyStages, *, sampler: ScriptedSampler | None = None, limits: LimitSettings = LIMITS, **environment: int
) -> AsyncIterator[SmallDeployment]:
    """One environment worker on this stage and one inference worker; checks at the end that everything rests."""
    configuration = build_configuration(limits=limits, environment=EnvironmentSettings(**{"slots": 2, **environment}))  # type: ignore[arg-type]
    with anyio.fail_after(600):
        async with small_deployment(configuration) as fleet:
            members = [fleet.environment("environment-0", make=stage), fleet.inference("inference-0", sampler=sampler)]
            await fleet.heard(*members)
            await anyio.wait_all_tasks_blocked()
            tasks = count_tasks()
            yield fleet
            await fleet.check_at_rest()
            ended = sum(member.ended.is_set() for member in members)
            assert count_tasks() <= tasks or ended, "a task is left"
            assert stage.opened == stage.closed, "an environment is not closed, or closed twice"


def count_tasks() -> int:
    """Running tasks without those that are used again: `check_at_rest` says that no delivery is in work in them."""
    return sum(TaskPool.__name__ not in (task.name or "") for task in anyio.get_running_tasks())


async def play_episode(
    stage: FaultyStages, *, sampler: ScriptedSampler | None = None, deadline_seconds: float = 300.0
) -> EpisodeFinished:
    async with start_deployment(stage, sampler=sampler) as fleet:
        await fleet.request(deadline_seconds=deadline_seconds)
        return await fleet.result()


def assert_not_graded(result: EpisodeFinished, outcome: str, error_class: str) -> None:
    assert (result.outcome, result.error_class) == (outcome, error_class)
    assert result.reward is None
