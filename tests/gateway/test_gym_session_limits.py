"""Sessions that hold one of the places of a gym gateway: those that were answered, until they are closed."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any, cast

import anyio
import pytest

from fleetbus.client.sessions import SessionUnavailable, sessions
from fleetbus_schemas import Subjects
from fleetbus_workers.gateway import gym_app
from fleetbus_workers.gateway.gym_app import GymGateway, GymSettings
from fleetbus_workers.gateway.gym_methods import GymCalls, SessionInfo
from fleetbus_workers.gateway.gym_wire import Request
from fleetbus_workers.replay.fixtures import memory_bus
from tests.support.gym_service import Handler, new_boundary, serve_gym

pytestmark = pytest.mark.integration


async def test_connecting_while_no_worker_is_there_holds_no_place() -> None:
    request = Request(fields={"env_config": {}}, key="0" * 32)
    with anyio.fail_after(50):
        async with memory_bus("run") as bus, sessions(bus, Subjects("run")) as client:
            calls = GymCalls(client, call_seconds=0.2, max_sessions=1)

            async def refused() -> None:
                with pytest.raises(SessionUnavailable):
                    await calls.connect(request)

            await refused()
            assert calls.sessions == {}
            async with anyio.create_task_group() as group:  # a client that repeats a request that is under way
                group.start_soon(refused)
                group.start_soon(refused)
            assert calls.sessions == {}


async def test_names_that_nobody_has_hold_no_place() -> None:
    async with serve_gym(Handler()) as wire:
        for method in ("system_prompt", "reset", "step", "close"):
            fields = {"session_id": f"unknown-{method}", "method": method, "params": {}}
            assert (await wire.post("/call", fields)).status_code == 404
        assert (await wire.get("/sessions")).json()["num_sessions"] == 0


async def test_an_episode_that_failed_leaves_its_place_to_the_next() -> None:
    handler = Handler(max_sessions=1)
    async with serve_gym(handler) as wire:
        handler.trouble["create_env"] = RuntimeError("no scene")
        assert "no scene" in (await wire.connect())["info"]["error"]
        session = (await wire.connect())["session_id"]
        handler.trouble["step"] = RuntimeError("the simulator is gone")
        boundary = new_boundary()
        failed = await wire.call(session, "step", boundary=boundary, action_str="a")
        assert await wire.call(session, "step", boundary=boundary, action_str="a") == failed
        assert (await wire.connect())["obs"] == "seed 1"
    assert (handler.created, handler.closed) == (2, 2)


async def test_a_clock_that_is_set_ends_no_session(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gym_app, "SWEEP_SECONDS", 0.01)
    async with serve_gym(Handler(session_timeout=3600)) as wire:
        session = (await wire.connect())["session_id"]
        now = time.time
        monkeypatch.setattr(time, "time", lambda: now() + 7200)
        await anyio.sleep(0.3)  # thirty sweeps
        monkeypatch.undo()
        assert (await wire.call(session, "step", action_str="a"))["obs"] == "1"


async def test_a_session_that_takes_long_to_end_holds_up_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gym_app, "SWEEP_SECONDS", 0.01)
    ended = {"slow": anyio.Event(), "quick": anyio.Event()}

    async def expire(session: str) -> None:
        known.pop(session)
        if session == "slow":
            await ended["quick"].wait()
        ended[session].set()

    known = {name: SessionInfo(created_at=0, last_access=0, used_at=time.monotonic() - 60) for name in ended}
    calls: Any = SimpleNamespace(sessions=known, expire=expire, forget_failed=lambda _: None)
    gateway = GymGateway(cast("Any", None), GymSettings(session_timeout=1))
    with anyio.fail_after(50):
        async with anyio.create_task_group() as group:
            group.start_soon(gateway._expire_idle, calls)
            await ended["slow"].wait()
            group.cancel_scope.cancel()
