"""Which sessions hold one of the places that a gym gateway has: those that were answered, until they are closed."""

from __future__ import annotations

import anyio
import pytest

from fleetbus.client.sessions import SessionUnavailable, sessions
from schemas import Subjects
from tests.support.gym_service import Handler, new_boundary, served
from workers.gateway.gym_calls import GymCalls
from workers.gateway.gym_wire import Request
from workers.replay.ground import memory_bus


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
    async with served(Handler()) as wire:
        for method in ("system_prompt", "reset", "step", "close"):
            fields = {"session_id": f"unknown-{method}", "method": method, "params": {}}
            assert (await wire.post("/call", fields)).status_code == 404
        assert (await wire.get("/sessions")).json()["num_sessions"] == 0


async def test_an_episode_that_failed_leaves_its_place_to_the_next() -> None:
    handler = Handler(max_sessions=1)
    async with served(handler) as wire:
        handler.trouble["create_env"] = RuntimeError("no scene")
        assert "no scene" in (await wire.connect())["info"]["error"]
        session = (await wire.connect())["session_id"]
        handler.trouble["step"] = RuntimeError("the simulator is gone")
        boundary = new_boundary()
        failed = await wire.call(session, "step", boundary=boundary, action_str="a")
        assert await wire.call(session, "step", boundary=boundary, action_str="a") == failed
        assert (await wire.connect())["obs"] == "seed 1"
    assert (handler.created, handler.closed) == (2, 2)
