"""The remote-gym service over real HTTP: its routes and errors, and the cases in which the protocol's own server goes wrong."""

from __future__ import annotations

import json
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import anyio
import httpx
import numpy as np
import pytest

from schemas import Action, Task
from workers.environment.remote_gym import RemoteGymEnvironment
from workers.environment.remote_gym_client import ServerPool
from workers.environment.remote_gym_wire import decode_response, encode_request, request_headers
from workers.gateway.gym_service import BaseGymHandler, GymService, build_gym_service
from workers.gateway.serve import serve
from workers.listening import bind


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class Handler(BaseGymHandler):
    """Counts what its environments really do; ``trouble`` is raised by the method of that name, once."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.created = self.closed = self.at_once = self.most_at_once = 0
        self.steps: list[str] = []
        self.seeds: list[int] = []
        self.trouble: dict[str, Exception] = {}
        self.step_seconds = 0.0
        self.stepping = anyio.Event()

    async def create_env(self, env_config: dict[str, Any]) -> Any:
        self.raise_once("create_env")
        self.created += 1
        return Counter(self, int(env_config.get("goal", 3)))

    def raise_once(self, name: str) -> None:
        if error := self.trouble.pop(name, None):
            raise error


class Counter:
    def __init__(self, handler: Handler, goal: int) -> None:
        self._handler = handler
        self._goal = goal
        self._count = 0

    async def system_prompt(self) -> dict[str, Any]:
        return {"obs_str": "Count."}

    async def reset(self, seed: int) -> tuple[dict[str, Any], dict[str, Any]]:
        self._handler.raise_once("reset")
        self._handler.seeds.append(seed)
        self._count = 0
        return {"obs_str": f"seed {seed}"}, {"seed": np.int64(seed), "odd": float("nan")}

    async def step(self, action: str) -> tuple[dict[str, Any], float, bool, dict[str, Any]]:
        handler = self._handler
        handler.at_once += 1
        handler.most_at_once = max(handler.most_at_once, handler.at_once)
        handler.stepping.set()
        try:
            await anyio.sleep(handler.step_seconds)
        finally:
            handler.at_once -= 1
        handler.steps.append(action)
        self._count += 1
        handler.raise_once("step")
        info = {"array": np.array([1.5, float("inf")]), "flag": np.bool_(True), "bytes": b"x"}
        return {"obs_str": f"{self._count}"}, np.float32(0.5), self._count >= self._goal, info

    async def close(self) -> None:
        self._handler.closed += 1
        self._handler.raise_once("close")


class Wire:
    """A client that can repeat a request as it was."""

    def __init__(self, client: httpx.AsyncClient, url: str) -> None:
        self._client = client
        self.url = url

    async def post(
        self, route: str, fields: dict[str, Any], *, boundary: str = "", timeout: float = 30, **options: Any
    ) -> httpx.Response:
        boundary = boundary or new_boundary()
        headers = request_headers(boundary) | options.pop("headers", {})
        body = encode_request(fields, boundary)
        return await self._client.post(self.url + route, content=body, headers=headers, timeout=timeout, **options)

    async def get(self, route: str, **options: Any) -> httpx.Response:
        return await self._client.get(self.url + route, **options)

    async def request(self, method: str, route: str, **options: Any) -> httpx.Response:
        return await self._client.request(method, self.url + route, **options)

    async def connect(
        self, config: dict[str, Any] | None = None, *, seed: int | None = 1, boundary: str = ""
    ) -> dict[str, Any]:
        fields: dict[str, Any] = {"env_config": config or {}} | ({} if seed is None else {"seed": seed})
        return fields_of(await self.post("/connect", fields, boundary=boundary))

    async def call(self, session: str, method: str, *, boundary: str = "", **parameters: Any) -> dict[str, Any]:
        fields = {"session_id": session, "method": method, "params": parameters}
        return fields_of(await self.post("/call", fields, boundary=boundary))


def new_boundary() -> str:
    return f"gym_env_{uuid.uuid4().hex}"


def fields_of(response: httpx.Response) -> dict[str, Any]:
    assert response.status_code == 200, response.text
    return decode_response(response.headers["content-type"], response.content).fields


@asynccontextmanager
async def served(handler: Handler, *, seconds: float = 50, **options: Any) -> AsyncIterator[Wire]:
    async with running(GymService(handler, **options).build(), seconds=seconds) as wire:
        yield wire


@asynccontextmanager
async def running(application: Any, *, seconds: float = 50, **serving: Any) -> AsyncIterator[Wire]:
    listener = bind("127.0.0.1", 0)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    stop = anyio.Event()
    with anyio.fail_after(seconds):
        async with anyio.create_task_group() as group, httpx.AsyncClient() as client:
            group.start_soon(partial(serve, application, listener, stop, **serving))
            yield Wire(client, url)
            stop.set()


async def test_an_episode_is_played_from_connect_to_close() -> None:
    handler = Handler()
    async with served(handler) as wire:
        opened = await wire.connect({"goal": 2}, seed=7)
        session = opened["session_id"]
        assert (opened["obs"], opened["info"]) == ("seed 7", {"seed": 7, "odd": "NaN"})
        assert await wire.call(session, "system_prompt") == {"obs": "Count."}
        step = await wire.call(session, "step", action_str="a")
        assert (step["obs"], step["reward"], step["done"]) == ("1", 0.5, False)
        assert step["info"]["array"] == [1.5, "Infinity"]
        step = await wire.call(session, "step", action_str="b")
        assert (step["obs"], step["reward"], step["done"]) == ("2", 0.5, True)
        assert (await wire.call(session, "reset", seed=8))["obs"] == "seed 8"
        assert await wire.call(session, "close") == {"closed": True}
    assert handler.steps == ["a", "b"]
    assert handler.created == handler.closed == 2


async def test_connecting_without_a_seed_only_makes_the_session() -> None:
    async with served(Handler()) as wire:
        opened = await wire.connect(seed=None)
        assert set(opened) == {"session_id"}
        assert (await wire.call(opened["session_id"], "reset"))["obs"] == "seed 0"


async def test_a_step_whose_answer_was_lost_is_not_done_again() -> None:
    handler = Handler()
    async with served(handler) as wire:
        session = (await wire.connect())["session_id"]
        boundary = new_boundary()
        first = await wire.call(session, "step", boundary=boundary, action_str="a")
        assert await wire.call(session, "step", boundary=boundary, action_str="a") == first
        await wire.call(session, "step", action_str="a")
    assert handler.steps == ["a", "a"]


async def test_a_client_that_waits_less_than_a_step_takes_never_makes_two_at_once() -> None:
    handler = Handler()
    handler.step_seconds = 0.5
    async with served(handler) as wire:
        session = (await wire.connect())["session_id"]
        boundary = new_boundary()
        fields = {"session_id": session, "method": "step", "params": {"action_str": "a"}}
        with pytest.raises(httpx.ReadTimeout):
            await wire.post("/call", fields, boundary=boundary, timeout=0.1)
        assert fields_of(await wire.post("/call", fields, boundary=boundary))["obs"] == "1"
    assert (handler.steps, handler.most_at_once) == (["a"], 1)


async def test_an_environment_that_raises_ends_the_episode_and_is_not_tried_again() -> None:
    handler = Handler()
    async with served(handler) as wire:
        session = (await wire.connect())["session_id"]
        handler.trouble["step"] = RuntimeError("the simulator is gone")
        step = await wire.call(session, "step", action_str="a")
        assert (step["done"], step["reward"], step["info"]["training_usable"]) == (True, 0.0, False)
        assert "the simulator is gone" in step["info"]["error"]
        assert (await wire.call(session, "step", action_str="b"))["info"]["training_usable"] is False
        await wire.call(session, "close")
    assert handler.steps == ["a"]
    assert handler.created == handler.closed


async def test_a_connect_whose_answer_was_lost_leaves_no_orphan() -> None:
    handler = Handler()
    async with served(handler) as wire:
        boundary = new_boundary()
        first = await wire.connect(boundary=boundary)
        assert await wire.connect(boundary=boundary) == first
        assert (await wire.get("/sessions")).json()["num_sessions"] == 1
    assert handler.created == 1


@pytest.mark.parametrize("method", ["reset", "create_env"])
async def test_a_connect_that_fails_leaks_no_session_and_no_environment(method: str) -> None:
    handler = Handler(max_sessions=1)
    async with served(handler) as wire:
        handler.trouble[method] = RuntimeError("no scene")
        failed = await wire.connect()
        assert "no scene" in failed["info"]["error"]
        await wire.call(failed["session_id"], "close")
        assert (await wire.connect())["obs"] == "seed 1"
    assert handler.created == handler.closed


async def test_a_close_that_raises_or_whose_answer_is_lost_still_closes_once() -> None:
    handler = Handler()
    async with served(handler) as wire:
        session = (await wire.connect())["session_id"]
        handler.trouble["close"] = RuntimeError("stuck")
        boundary = new_boundary()
        assert await wire.call(session, "close", boundary=boundary) == {"closed": True}
        assert await wire.call(session, "close", boundary=boundary) == {"closed": True}
        assert (await wire.get("/sessions")).json()["num_sessions"] == 0
    assert handler.closed == 1


async def test_an_idle_session_expires_and_a_running_step_keeps_it() -> None:
    handler = Handler(session_timeout=1.0)
    handler.step_seconds = 2.5
    async with served(handler) as wire:
        session = (await wire.connect())["session_id"]
        assert (await wire.call(session, "step", action_str="slow"))["obs"] == "1"
        while (await wire.get("/sessions")).json()["num_sessions"]:  # noqa: ASYNC110
            await anyio.sleep(0.1)
        late = await wire.post("/call", {"session_id": session, "method": "step", "params": {}})
        assert late.status_code == 404
    assert handler.created == handler.closed == 1


async def test_the_key_is_asked_for_by_header_or_query() -> None:
    async with served(Handler(), api_key="secret") as wire:
        assert (await wire.get("/health")).json()["ok"] is True
        assert (await wire.get("/sessions")).status_code == 401
        wrong = await wire.post("/connect", {}, headers={"X-API-Key": "wrong"})
        assert (wrong.status_code, wrong.json()) == (401, {"detail": "unauthorized"})
        assert (await wire.post("/connect", {}, headers={"X-API-Key": "secret"})).status_code == 200
        assert (await wire.post("/connect", {}, params={"token": "secret"})).status_code == 200
        assert (await wire.post("/connect", {}, params={"token": "é"}, headers={"X-API-Key": "secret"})).status_code == 401


@pytest.mark.parametrize(
    ("fields", "status", "detail"),
    [
        ({}, 400, "session_id required"),
        ({"session_id": "s"}, 400, "method required"),
        ({"session_id": "s", "method": "dance"}, 400, "dance"),
        ({"session_id": "s", "method": "step", "params": 3}, 400, "params"),
        ({"session_id": "never", "method": "step"}, 404, "Session never not found"),
        ({"session_id": "never", "method": "system_prompt"}, 404, "Session never not found"),
        ({"session_id": "a.b", "method": "step"}, 404, "Session a.b not found"),
        ({"session_id": "s", "method": "reset", "params": {"seed": "x"}}, 400, "seed"),
    ],
)
async def test_what_is_wrong_with_a_call_is_told(fields: dict[str, Any], status: int, detail: str) -> None:
    async with served(Handler()) as wire:
        response = await wire.post("/call", fields)
        assert response.status_code == status
        assert detail in response.json()["detail"]


@pytest.mark.parametrize(
    ("content_type", "body"),
    [
        ("text/plain", b"hello"),
        ("multipart/form-data", b"no boundary"),
        ('multipart/form-data; boundary="b"', b"--b\r\n\r\nnot closed"),
        ('multipart/form-data; boundary="b"', b"--b\r\nContent-Type: application/json\r\n\r\n{broken\r\n--b--\r\n"),
        ("application/json", b"[1, 2]"),
        ("application/json", b'{"a":' * 100_000),
    ],
)
async def test_a_body_that_cannot_be_read_is_refused_and_makes_no_session(content_type: str, body: bytes) -> None:
    handler = Handler()
    async with served(handler) as wire:
        response = await wire.request("POST", "/connect", content=body, headers={"Content-Type": content_type})
        assert response.status_code == 400
        assert json.loads(response.content)["detail"]
    assert handler.created == 0


async def test_the_first_generation_of_clients_is_understood_too() -> None:
    head = b'--b0\r\nContent-Disposition: form-data; name="data"; filename="data.json"\r\n\r\n'
    body = head + b'{"env_config": {}, "seed": 4}\r\n--b0--\r\n'
    async with served(Handler()) as wire:
        headers = {"Content-Type": "multipart/form-data; boundary=b0"}
        response = await wire.request("POST", "/connect", content=body, headers=headers)
        assert fields_of(response)["obs"] == "seed 4"


async def test_other_methods_and_larger_bodies_are_refused() -> None:
    async with served(Handler()) as wire:
        assert (await wire.get("/connect")).status_code == 405
        too_large = await wire.request("POST", "/connect", content=b"x" * ((16 << 20) + 1))
        assert too_large.status_code == 413


async def test_when_too_many_calls_run_the_next_is_told_to_come_again() -> None:
    handler = Handler()
    handler.step_seconds = 1.0
    async with served(handler, max_inflight=1, admit_timeout=0.1) as wire:
        session = (await wire.connect())["session_id"]
        async with anyio.create_task_group() as group:
            group.start_soon(lambda: wire.call(session, "step", action_str="a"))
            await handler.stepping.wait()
            busy = await wire.post("/connect", {})
            assert (busy.status_code, busy.json()["detail"]) == (503, "server busy")


async def test_more_sessions_than_allowed_are_refused_by_the_known_words() -> None:
    async with served(Handler(max_sessions=1)) as wire:
        await wire.connect()
        refused = await wire.post("/connect", {"env_config": {}})
        assert refused.status_code == 503
        assert "Max sessions limit reached (1)" in refused.json()["detail"]


async def test_the_first_way_of_making_a_service_takes_its_limits_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GYM_API_KEY", "k")
    monkeypatch.setenv("GYM_MAX_INFLIGHT", "7")
    async with running(build_gym_service(Handler())) as wire:
        told = {"ok": True, "service": "gym-env-service", "max_inflight": 7, "idempotent": True}
        assert (await wire.get("/health")).json() == told
        assert (await wire.get("/sessions")).status_code == 401


@pytest.mark.parametrize("parameters", [{"action_str": "\ud800"}, {"action_str": "x" * (2 << 20)}])
async def test_a_call_that_cannot_travel_is_refused_and_the_session_goes_on(parameters: dict[str, Any]) -> None:
    handler = Handler()
    async with served(handler) as wire:
        session = (await wire.connect())["session_id"]
        fields = {"session_id": session, "method": "step", "params": parameters}
        headers = {"Content-Type": "application/json"}
        refused = await wire.request("POST", "/call", content=json.dumps(fields).encode(), headers=headers)
        assert (refused.status_code, "cannot travel" in refused.json()["detail"]) == (400, True)
        assert (await wire.call(session, "step", action_str="a"))["obs"] == "1"
    assert handler.steps == ["a"]


async def test_a_service_calls_what_its_maker_wants_called_at_its_start_and_end() -> None:
    called: list[str] = []

    async def started() -> None:
        called.append("started")

    handler = Handler(max_sessions=3)
    assert handler.get_session_stats()["num_sessions"] == 0
    application = GymService(handler).build(startup_callback=started, shutdown_callback=lambda: called.append("stopped"))
    assert handler.get_session_stats()["num_sessions"] == 0
    async with running(application) as wire:
        await wire.connect()
        assert called == ["started"]
        assert handler.get_session_stats()["num_sessions"] == 1
        told = (await wire.get("/sessions")).json()
        assert set(told) == {"num_sessions", "max_sessions", "session_timeout", "sessions"}
        assert set(told["sessions"][0]) == {"session_id", "created_at", "last_access", "idle_seconds", "will_timeout_in"}
    assert called == ["started", "stopped"]


async def test_thirty_two_clients_at_a_time_lose_and_double_nothing() -> None:
    handler = Handler()
    async with served(handler) as wire:

        async def play() -> None:
            session = (await wire.connect({"goal": 5}))["session_id"]
            for count in range(1, 6):
                assert (await wire.call(session, "step", action_str="x"))["obs"] == str(count)
            await wire.call(session, "close")

        async with anyio.create_task_group() as group:
            for _ in range(32):
                group.start_soon(play)
    assert (len(handler.steps), handler.created, handler.closed) == (160, 32, 32)


async def test_fleetbus_s_own_client_of_the_protocol_plays_through_the_service() -> None:
    handler = Handler()
    pool = ServerPool()
    async with served(handler) as wire, pool.running():
        environment = RemoteGymEnvironment(pool, [wire.url])
        await environment.open(Task(key="t", config={"goal": 2}, seed=5))
        start = await environment.reset()
        assert [message.content for message in start.messages] == ["Count.", "seed 5"]
        for turn, over in enumerate((False, True)):
            step = await environment.step(Action(episode_id="e", attempt=1, turn=turn, text="x"))
            assert (step.reward, step.terminated) == (0.5, over)
        assert (await environment.verify()).reward == 1.0
        await environment.close()
    assert handler.steps == ["x", "x"]
