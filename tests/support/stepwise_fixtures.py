"""Workers that host step-wise sessions of an environment that counts, on virtual time, and a client of them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import msgspec

from fleetbus.client.sessions import SessionClient, sessions
from fleetbus.config.settings import EnvironmentSettings
from fleetbus_schemas import Action, ChatMessage, ContextChange, SessionCall, Task
from fleetbus_workers.environment.base import Start, Step, Verdict
from tests.support.deployment_member import Member
from tests.support.small_deployment import LIMITS, SmallDeployment, build_configuration, small_deployment

TASK = Task(key="count", prompt="Count.")


class World:
    """Where the counters of one test live: how often each thing was done, and how long a step takes."""

    def __init__(self, *, replayable: bool = True, step_seconds: float = 0.0, close_seconds: float = 0.0) -> None:
        self.replayable = replayable
        self.step_seconds = step_seconds
        self.close_seconds = close_seconds
        self.most_open = 0
        self.steps: list[str] = []
        self.at_once = self.most_at_once = 0
        self.opened = self.closed = 0
        self.stepping = anyio.Event()
        self.error: Exception | None = None
        self.drift = 0
        self.changes: dict[int, ContextChange] = {}
        """How the policy's context goes on after so many steps."""

    def __call__(self) -> CountingEnvironment:
        return CountingEnvironment(self)


class CountingEnvironment:
    """Tells how many actions it saw, and the last one."""

    def __init__(self, world: World) -> None:
        self.replayable = world.replayable
        self._world = world
        self._count = world.drift

    async def open(self, task: Task) -> None:
        self._world.opened += 1
        self._world.most_open = max(self._world.most_open, self._world.opened - self._world.closed)
        self._seed = task.seed or 0
        await anyio.lowlevel.checkpoint()

    async def reset(self) -> Start:
        await anyio.lowlevel.checkpoint()
        return Start(messages=(ChatMessage(role="user", content=f"start {self._seed}"),))

    async def step(self, action: Action) -> Step:
        world = self._world
        world.at_once += 1
        world.most_at_once = max(world.most_at_once, world.at_once)
        world.stepping.set()
        try:
            await anyio.sleep(world.step_seconds)
        finally:
            world.at_once -= 1
        if world.error is not None:
            raise world.error
        world.steps.append(action.text)
        self._count += 1
        text = f"{self._count}: {action.text}"
        message, change = ChatMessage(role="user", content=text), world.changes.get(self._count)
        return Step(messages=(message,), reward=1.0, terminated=self._count >= 5, context=change)

    async def state(self) -> dict[str, Any]:
        return {"count": self._count}

    async def verify(self) -> Verdict:
        return Verdict(reward=float(self._count), reason="counted")

    async def close(self) -> None:
        await anyio.sleep(self._world.close_seconds)
        self._world.closed += 1


class SessionFixture:
    """One fleet, one client."""

    def __init__(self, fleet: SmallDeployment, client: SessionClient) -> None:
        self.fleet = fleet
        self.client = client

    def worker(self, name: str, world: World) -> Member:
        return self.fleet.environment(name, make=world)

    async def empty(self, *members: Member) -> None:
        """Until these workers say that no session holds a slot."""
        beats = self.fleet.beats
        for member in members:
            beats.pop(member.name, None)
        await self.fleet.until(lambda: all(each.name in beats and not beats[each.name].sessions for each in members))

    async def ask(self, call: SessionCall) -> Any:
        return await self.client.call(call, timeout=60)


@asynccontextmanager
async def session_fixture(*, slots: int = 4, **limits: float) -> AsyncIterator[SessionFixture]:
    configuration = build_configuration(
        environment=EnvironmentSettings(slots=8, session_slots=slots), limits=msgspec.structs.replace(LIMITS, **limits)
    )
    with anyio.fail_after(20_000):
        async with small_deployment(configuration) as fleet, sessions(fleet.bus, fleet.subjects) as client:
            yield SessionFixture(fleet, client)


def read_text(answer: Any) -> str:
    (message,) = answer.messages
    return str(message.content)
