"""The OpenEnv gateway over a real WebSocket: the protocol, and what its own servers get wrong."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import httpx
import msgspec
import pytest
from websockets.asyncio.client import ClientConnection, connect

from fleetbus.client.sessions import sessions
from fleetbus.config.settings import EnvironmentSettings
from schemas import Action, ChatMessage, Task, ToolSpec
from tests.support.small_fleet import LIMITS, Member, SmallFleet, configured, small_fleet
from workers.connections import Bounds
from workers.environment.base import Start, Step, Verdict
from workers.environment.openenv_client import open_session
from workers.gateway.openenv_app import OpenEnvGateway, OpenEnvSettings
from workers.gateway.serve import BOUNDS, serve
from workers.listening import bind


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


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
        return Verdict(reward=1.0)

    async def close(self) -> None:
        self._world.closed += 1
        await anyio.lowlevel.checkpoint()


class Here:
    """A gateway over one environment worker."""

    def __init__(self, fleet: SmallFleet, world: World, worker: Member, url: str) -> None:
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
    async def another(self) -> AsyncIterator[Here]:
        """A second gateway over the same worker."""
        async with serving(self.fleet) as url:
            yield Here(self.fleet, self.world, self.worker, url)

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
) -> AsyncIterator[Here]:
    world = World()
    limits = msgspec.structs.replace(LIMITS, drain=0.2)  # nobody waits for sessions that a test leaves open
    configuration = configured(environment=EnvironmentSettings(slots=8, session_slots=slots), limits=limits)
    with anyio.fail_after(seconds):
        async with small_fleet(configuration) as fleet:
            worker = fleet.environment("e1", make=make or world)
            async with serving(fleet, load, **settings) as url:
                yield Here(fleet, world, worker, url)


@asynccontextmanager
async def serving(fleet: SmallFleet, load: Any = None, bounds: Bounds = BOUNDS, **settings: Any) -> AsyncIterator[str]:
    """The address of a gateway to the fleet."""
    async with anyio.create_task_group() as group:
        listener = bind("127.0.0.1", 0)
        told = OpenEnvGateway(
            lambda: sessions(fleet.bus, fleet.subjects), OpenEnvSettings(**settings), loading=lambda client: load
        )
        stop, stopped = anyio.Event(), anyio.Event()

        async def run() -> None:
            await serve(told.application(), listener, stop, bounds=bounds)
            stopped.set()

        group.start_soon(run)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        stop.set()
        await stopped.wait()


async def test_an_episode_is_played_over_one_socket() -> None:
    async with gateway() as here, here.socket() as socket:
        told = (await socket.ask("reset", seed=7, prompt="Add to"))["data"]
        assert told["observation"]["text"] == "Add to 7"
        assert (told["reward"], told["done"]) == (None, False)
        for turn, done in enumerate((False, False, True), 1):
            told = (await socket.ask("step", text=f"t{turn}"))["data"]
            assert (told["observation"]["text"], told["reward"], told["done"]) == (f"t{turn}", 0.5, done)
        state = (await socket.send('{"type": "state"}'))["data"]
        assert (state["step_count"], state["count"]) == (3, 3)


async def test_the_project_s_own_client_of_the_protocol_plays_through_the_gateway() -> None:
    async with gateway() as here:
        session = await open_session(f"{here.url.replace('http', 'ws', 1)}/ws")
        await session.reset({"seed": 1})
        observed = await session.step({"message": "hi"})
        assert observed.reward == 0.5
        assert (await session.state())["step_count"] == 1
        await session.close()
        await here.empty()


async def test_a_step_before_reset_and_one_after_the_end_are_refused() -> None:
    async with gateway() as here, here.socket() as socket:
        refused = await socket.ask("step", text="early")
        assert (refused["type"], refused["data"]["code"]) == ("error", "EXECUTION_ERROR")
        await socket.ask("reset")
        for _ in range(3):
            await socket.ask("step", text="x")
        assert (await socket.ask("step", text="late"))["data"]["code"] == "EXECUTION_ERROR"
        assert len(here.world.steps) == 3


@pytest.mark.parametrize(
    ("frame", "code"),
    [
        ("notjson", "INVALID_JSON"),
        (b"\xff\x00binary", "INVALID_JSON"),
        ("[1, 2]", "VALIDATION_ERROR"),
        ('{"type": "bogus"}', "UNKNOWN_TYPE"),
        ("{}", "UNKNOWN_TYPE"),
        ('{"type": "step"}', "VALIDATION_ERROR"),
        ('{"type": "step", "data": {"wrong": 1}}', "VALIDATION_ERROR"),
        ('{"type": "step", "data": {"type": "call_tool", "tool_name": 3}}', "VALIDATION_ERROR"),
        ('{"type": "step", "data": {"text": "x"}, "request_id": "r"}', "VALIDATION_ERROR"),
        ('{"type": "reset", "data": {"seed": -1}}', "VALIDATION_ERROR"),
        ('{"type": "reset", "data": {"seed": 1e30}}', "VALIDATION_ERROR"),
        ('{"type": "reset", "data": {"seed": 123456789012345678901234567890}}', "VALIDATION_ERROR"),
        ('{"type": "\\ud800"}', "UNKNOWN_TYPE"),
        ('{"type": "step", "data": {"text": "\\ud800"}}', "VALIDATION_ERROR"),
        (
            '{"type": "step", "data": {"type": "call_tool", "tool_name": "add", "arguments": {"a": 99999999999999999999}}}',
            "VALIDATION_ERROR",
        ),
        (json.dumps({"type": "step", "data": {"text": "x" * (2 << 20)}}), "VALIDATION_ERROR"),
    ],
)
async def test_a_bad_frame_never_ends_the_session(frame: str | bytes, code: str) -> None:
    async with gateway() as here, here.socket() as socket:
        await socket.ask("reset")
        await socket.ask("step", text="one")
        error = await socket.send(frame)
        assert (error["type"], error["data"]["code"]) == ("error", code), error
        await socket.ask("step", text="two")
        assert (await socket.send('{"type": "state"}'))["data"]["step_count"] == 2


async def test_an_environment_that_raises_says_so_and_a_reset_begins_anew() -> None:
    async with gateway() as here, here.socket() as socket:
        await socket.ask("reset")
        error = (await socket.ask("step", text="boom"))["data"]
        assert (error["code"], error["error_class"]) == ("EXECUTION_ERROR", "RuntimeError")
        assert "boom!" in error["message"]
        assert (await socket.ask("reset"))["type"] == "observation"


async def test_what_is_no_number_is_told_and_not_null() -> None:
    async with gateway() as here, here.socket() as socket:
        told = (await socket.ask("reset"))["data"]
        assert told["metadata"] == {"score": "NaN"}
        error = (await socket.ask("step", text="nan"))["data"]
        assert (error["code"], error["error_class"]) == ("EXECUTION_ERROR", "reward_not_finite")


async def test_over_capacity_a_connection_waits_for_a_slot() -> None:
    async with gateway(slots=1, capacity_timeout=30) as here, here.socket() as second:
        async with here.socket() as first, anyio.create_task_group() as group:
            await first.ask("reset")
            answers: list[dict[str, Any]] = []

            async def wait() -> None:
                answers.append(await second.ask("reset"))

            group.start_soon(wait)
            await first.ask("step", text="x")
            assert not answers
            await first.connection.close()
        assert answers[0]["type"] == "observation"


async def test_without_a_slot_in_time_the_protocol_s_own_error_comes() -> None:
    async with gateway(slots=1, capacity_timeout=0.5) as here, here.socket() as first, here.socket() as second:
        await first.ask("reset")
        assert (await second.ask("reset"))["data"]["code"] == "CAPACITY_REACHED"


async def test_a_client_that_is_gone_frees_its_slot_and_its_environment_is_closed() -> None:
    async with gateway(slots=1) as here:
        async with here.socket() as socket:
            await socket.ask("reset")
            socket.connection.transport.abort()
        await here.empty()
        assert here.world.opened == here.world.closed == 1


async def test_tool_calls_are_steps_however_they_come() -> None:
    async with gateway() as here, here.socket() as socket:
        await socket.ask("reset")
        listed = await socket.ask("mcp", jsonrpc="2.0", method="tools/list", id=1)
        assert listed["data"]["result"]["tools"][0]["name"] == "add"
        called = await socket.ask("step", type="call_tool", tool_name="add", arguments={"a": 2, "b": 3})
        told = called["data"]["observation"]
        assert (told["text"], told["tool_name"], told["error"]) == ("5", "add", None)
        assert told["result"] == {"content": [{"type": "text", "text": "5"}], "data": "5", "is_error": False}
        arguments = {"name": "add", "arguments": {"a": 1, "b": 1}}
        called = await socket.ask("mcp", jsonrpc="2.0", method="tools/call", id=2, params=arguments)
        assert (called["data"]["result"]["data"], called["data"]["result"]["reward"]) == ("2", 0.5)
        assert (await socket.send('{"type": "state"}'))["data"]["step_count"] == 2


async def test_sessions_over_http_are_made_used_and_closed() -> None:
    async with gateway() as here:
        session = (await here.rpc("openenv/session/create", seed=1))["result"]["session_id"]
        assert (await here.rpc("tools/list", session_id=session))["result"]["tools"][0]["name"] == "add"
        called = await here.rpc("tools/call", session_id=session, name="add", arguments={"a": 1, "b": 2})
        assert called["result"]["data"] == "3"
        assert (await here.rpc("initialize", session_id=session))["error"]["code"] == -32601
        assert (await here.rpc("tools/list", session_id="nope"))["error"]["code"] == -32602
        assert (await here.rpc("openenv/session/close", session_id=session))["result"]["closed"] is True
        await here.empty()


async def test_a_session_made_over_http_goes_on_over_a_socket() -> None:
    async with gateway() as here:
        session = (await here.rpc("openenv/session/create"))["result"]["session_id"]
        async with here.socket(f"?session_id={session}") as socket:
            assert (await socket.ask("step", text="x"))["data"]["reward"] == 0.5
        async with here.socket("?session_id=nope") as socket:
            assert json.loads(await socket.connection.recv())["data"]["code"] == "SESSION_ERROR"
