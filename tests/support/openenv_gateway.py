"""An OpenEnv gateway over one environment worker in this process, and a client's socket to it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import httpx
import msgspec
from websockets.asyncio.client import ClientConnection, connect

from fleetbus.client.sessions import sessions
from fleetbus.config.settings import EnvironmentSettings
from fleetbus_schemas import Action, ChatMessage, Task, ToolSpec
from fleetbus_workers.environment.base import Start, Step, Verdict
from fleetbus_workers.gateway.openenv_app import OpenEnvGateway, OpenEnvSettings
from fleetbus_workers.serving.connections import Bounds
from fleetbus_workers.serving.listeners import bind
from fleetbus_workers.serving.serve import BOUNDS, serve
from tests.support.deployment_member import Member
from tests.support.small_deployment import LIMITS, SmallDeployment, build_configuration, small_deployment


class World:
    def __init__(self) -> None:
        self.opened = self.closed = 0
        self.steps: list[str] = []
        self.begun, self.stepping = anyio.Event(), anyio.Event()

    def __call__(self) -> Adder:
        return Adder(self)


class Adder:
    """Three steps; "boom" raises, "slow" takes its time, "nan" rewards nothing that is a number; the tool `add` adds."""

    replayable = True

    def __init__(self, world: World) -> None:
        self._world = world
        self._count = 0

    async def open(self, task: Task) -> None:
        self._world.opened += 1
        self._task = task
        await anyio.lowlevel.checkpoint()

    async def reset(self) -> Start:
        self._world.begun.set()
        text = f"{self._task.prompt or 'hello'} {self._task.seed}"
        return Start(
            messages=(ChatMessage(role="system", content="Add."), ChatMessage(role="user", content=text)),
            tools=(ToolSpec(name="add", description="Adds."),),
            info={"score": float("nan")},
        )

    async def step(self, action: Action) -> Step:
        self._world.steps.append(action.text)
        if action.text == "boom":
            raise RuntimeError("boom!")
        if action.text.startswith("slow"):
            self._world.stepping.set()
            await anyio.sleep(float(action.text[4:] or 1))
        self._count += 1
        text = action.text
        if action.tool_calls:
            text = str(sum(action.tool_calls[0].arguments.values()))
        reward = float("nan") if action.text == "nan" else 0.5
        return Step(
            messages=(ChatMessage(role="user", content=text),), reward=reward, terminated=self._count >= 3, tool_calls=1
        )

    async def state(self) -> dict[str, Any]:
        return {"count": self._count}

    async def verify(self) -> Verdict:
        return Verdict(reward=0.5 * self._count)

    async def close(self) -> None:
        self._world.closed += 1
        await anyio.lowlevel.checkpoint()


class GatewayFixtures:
    """A gateway over one environment worker."""

    def __init__(self, fleet: SmallDeployment, world: World, worker: Member, url: str) -> None:
        self.fleet = fleet
        self.world = world
        self.worker = worker
        self.url = url

    @asynccontextmanager
    async def socket(self, query: str = "", *, session: str = "", route: str = "/ws") -> AsyncIterator[Socket]:
        path = (f"/sessions/{session}" if session else "") + route + query
        async with connect(f"{self.url.replace('http', 'ws', 1)}{path}", max_size=None) as connection:
            yield Socket(connection)

    @asynccontextmanager
    async def another(self) -> AsyncIterator[GatewayFixtures]:
        """A second gateway over the same worker."""
        async with serving(self.fleet) as url:
            yield GatewayFixtures(self.fleet, self.world, self.worker, url)

    async def rpc(self, method: str, **parameters: Any) -> dict[str, Any]:
        asked = {"jsonrpc": "2.0", "id": 1, "method": method, "params": parameters}
        async with httpx.AsyncClient() as client:
            return dict((await client.post(f"{self.url}/mcp", json=asked)).json())

    async def empty(self) -> None:
        """Until the worker says that no session holds a slot."""
        beats = self.fleet.beats
        beats.pop(self.worker.name, None)
        await self.fleet.until(lambda: self.worker.name in beats and not beats[self.worker.name].sessions)


class Socket:
    def __init__(self, connection: ClientConnection) -> None:
        self.connection = connection

    async def send(self, frame: str | bytes) -> dict[str, Any]:
        await self.connection.send(frame)
        return dict(json.loads(await self.connection.recv()))

    async def ask(self, kind: str, **data: Any) -> dict[str, Any]:
        return await self.send(json.dumps({"type": kind, "data": data}))


@asynccontextmanager
async def gateway(
    *, slots: int = 4, seconds: float = 50, make: Any = None, load: Any = None, **settings: Any
) -> AsyncIterator[GatewayFixtures]:
    world = World()
    limits = msgspec.structs.replace(LIMITS, drain=0.2)  # nobody waits for sessions that a test leaves open
    configuration = build_configuration(environment=EnvironmentSettings(slots=8, session_slots=slots), limits=limits)
    with anyio.fail_after(seconds):
        async with small_deployment(configuration) as fleet:
            worker = fleet.environment("e1", make=make or world)
            async with serving(fleet, load, **settings) as url:
                yield GatewayFixtures(fleet, world, worker, url)


@asynccontextmanager
async def serving(fleet: SmallDeployment, load: Any = None, bounds: Bounds = BOUNDS, **settings: Any) -> AsyncIterator[str]:
    """The address of a gateway to the fleet."""
    async with anyio.create_task_group() as group:
        listener = bind("127.0.0.1", 0)
        told = OpenEnvGateway(
            lambda: sessions(fleet.bus, fleet.subjects), OpenEnvSettings(**settings), build_loader=lambda client: load
        )
        stop, stopped = anyio.Event(), anyio.Event()

        async def run() -> None:
            await serve(told.application(), listener, stop, bounds=bounds)
            stopped.set()

        group.start_soon(run)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        stop.set()
        await stopped.wait()
