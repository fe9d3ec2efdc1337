"""A gateway that stops in the middle of calls cuts them off in a line each, and tells whoever asked to ask again."""

from __future__ import annotations

import logging
from functools import partial

import anyio
import httpx
import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed

from fleetbus.client.sessions import sessions
from fleetbus_workers.gateway.gym_service import GymService
from fleetbus_workers.gateway.openenv_app import OpenEnvGateway, OpenEnvSettings
from fleetbus_workers.serving.listeners import bind
from fleetbus_workers.serving.serve import serve
from tests.support.gym_service import Handler, Wire
from tests.support.openenv_gateway import gateway


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fleetbus_workers.serving.serve.GRACE_SECONDS", 1)


def tracebacks(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.exc_info and record.levelno >= logging.ERROR]


@pytest.mark.integration
async def test_a_call_that_outlasts_the_grace_is_told_to_come_again(caplog: pytest.LogCaptureFixture) -> None:
    handler, stop, answers = Handler(), anyio.Event(), list[httpx.Response]()
    handler.step_seconds = 30
    listener = bind("127.0.0.1", 0)
    with anyio.fail_after(25):
        async with httpx.AsyncClient(timeout=30) as client, anyio.create_task_group() as group:
            group.start_soon(partial(serve, GymService(handler).build(), listener, stop))
            wire = Wire(client, f"http://127.0.0.1:{listener.getsockname()[1]}")
            session = (await wire.connect())["session_id"]

            async def step() -> None:
                answers.append(
                    await wire.post("/call", {"session_id": session, "method": "step", "params": {"action_str": "x"}})
                )

            group.start_soon(step)
            await handler.stepping.wait()
            stop.set()
    assert (answers[0].status_code, "ask again" in answers[0].json()["detail"]) == (503, True)
    assert tracebacks(caplog) == []


@pytest.mark.integration
async def test_a_socket_in_the_middle_of_a_step_is_closed_without_a_traceback(caplog: pytest.LogCaptureFixture) -> None:
    stop = anyio.Event()
    listener = bind("127.0.0.1", 0)
    async with gateway() as here, anyio.create_task_group() as group:
        told = OpenEnvGateway(lambda: sessions(here.fleet.bus, here.fleet.subjects), OpenEnvSettings())
        group.start_soon(partial(serve, told.application(), listener, stop))
        async with connect(f"ws://127.0.0.1:{listener.getsockname()[1]}/ws") as socket:
            await socket.send('{"type": "reset", "data": {}}')
            await socket.recv()
            await socket.send('{"type": "step", "data": {"text": "slow4"}}')
            await here.world.stepping.wait()
            stop.set()
            with pytest.raises(ConnectionClosed):
                await socket.recv()
    assert tracebacks(caplog) == []
