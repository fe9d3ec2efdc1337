"""An environment that rewards each step as its task says, and has the verdict that its task says: `PAYMENTS`."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio.lowlevel

from fleetbus.client.sessions import sessions
from fleetbus.config.settings import EnvironmentSettings
from fleetbus_schemas import Action, ChatMessage, Task
from fleetbus_workers.environment.base import Start, Step, Verdict
from fleetbus_workers.gateway.gym_app import GymGateway, GymSettings
from fleetbus_workers.gateway.gym_methods import GymCalls
from tests.support.gym_service import Wire, running
from tests.support.small_deployment import SmallDeployment, build_configuration

PAYMENTS: dict[str, tuple[list[float], float | None, list[float]]] = {
    "the steps are paid, the last with nothing": ([0.5, 0.1, 0.0], 0.6, [0.5, 0.1, 0.0]),
    "the steps are paid, the last as well": ([0.5, 0.0, 0.5], 1.0, [0.5, 0.0, 0.5]),
    "the end alone is graded": ([0.0, 0.0, 0.0], 1.0, [0.0, 0.0, 1.0]),
    "the end is graded beyond what was paid": ([0.25, 0.25, 0.0], 2.0, [0.25, 0.25, 1.5]),
    "the verdict is less than what was paid": ([0.5, 0.5, 0.0], 0.0, [0.5, 0.5, -1.0]),
    "nothing was earned": ([0.0, 0.0, 0.0], 0.0, [0.0, 0.0, 0.0]),
}
"""Rewards of the steps, the verdict, and the rewards that whoever plays through any gateway is told."""


class PayingEnvironment:
    """``task.config``: ``rewards`` of its steps, after which it is over, and its ``verdict``."""

    replayable = True

    async def open(self, task: Task) -> None:
        self._rewards = list(task.config["rewards"])
        self._verdict = task.config["verdict"]
        self._count = 0
        await anyio.lowlevel.checkpoint()

    async def reset(self) -> Start:
        await anyio.lowlevel.checkpoint()
        return Start(messages=(ChatMessage(role="user", content="begin"),))

    async def step(self, action: Action) -> Step:
        await anyio.lowlevel.checkpoint()
        reward = self._rewards[self._count]
        self._count += 1
        return Step(
            messages=(ChatMessage(role="user", content=f"{self._count}"),),
            reward=reward,
            terminated=self._count == len(self._rewards),
        )

    async def state(self) -> dict[str, Any]:
        return {}

    async def verify(self) -> Verdict:
        await anyio.lowlevel.checkpoint()
        return Verdict(reward=self._verdict, reason="as the task says")

    async def close(self) -> None:
        await anyio.lowlevel.checkpoint()


def paying_configuration() -> Any:
    return build_configuration(environment=EnvironmentSettings(slots=8, session_slots=8))


@asynccontextmanager
async def gym_gateway(fleet: SmallDeployment, *, load: Any = None, **settings: Any) -> AsyncIterator[Wire]:
    """A remote-gym gateway to a fleet in this process, and a client of it."""

    @asynccontextmanager
    async def calls() -> AsyncIterator[GymCalls]:
        async with sessions(fleet.bus, fleet.subjects) as client:
            yield GymCalls(client, call_seconds=60, max_sessions=0, load=load)

    async with running(GymGateway(calls, GymSettings(**settings)).application()) as wire:
        yield wire
