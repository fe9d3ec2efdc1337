"""A remote-gym service that counts what its environments really do, and a client that can repeat its requests."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import anyio
import httpx
import numpy as np

from fleetbus_workers.environment.adapters.remote_gym.wire import build_request_headers, decode_response, encode_request
from fleetbus_workers.gateway.gym_service import BaseGymHandler, GymService
from fleetbus_workers.serving.listeners import bind
from fleetbus_workers.serving.serve import serve


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
        return {"obs_str": f"{self._count}"}, np.float32(0.5), self._count >= self._goal, info  # type: ignore[return-value]

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
        headers = build_request_headers(boundary) | options.pop("headers", {})
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
async def serve_gym(handler: Handler, *, seconds: float = 50, **options: Any) -> AsyncIterator[Wire]:
    async with running(GymService(handler, **options).build(), seconds=seconds) as wire:
        yield wire


@asynccontextmanager
async def running(application: Any, *, seconds: float = 50, **serving: Any) -> AsyncIterator[Wire]:
    listener = bind("127.0.0.1", 0)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    stop = anyio.Event()
    with anyio.fail_after(seconds):
        async with anyio.create_task_group() as group, httpx.AsyncClient(timeout=30.0) as client:
            group.start_soon(partial(serve, application, listener, stop, **serving))
            yield Wire(client, url)
            stop.set()
