"""A remote-gym gateway over remote-gym environments: a killed worker leaves no session behind on the servers upstream."""

from __future__ import annotations

from pathlib import Path

import anyio
import pytest

from fleetbus.client.sessions import SessionFailed, sessions
from fleetbus_schemas import Task
from tests.support.gateway_processes import SUBJECTS, start_processes
from tests.support.remote_gym_server import RemoteGymDouble, remote_gym_double

CLIENTS = 8


@pytest.mark.integration
async def test_whoever_takes_over_from_a_killed_worker_closes_its_sessions_upstream(tmp_path: Path) -> None:
    double = RemoteGymDouble(goal=5)
    async with (
        remote_gym_double(double),
        start_processes(tmp_path / "store") as fleet,
        sessions(fleet.operator, SUBJECTS) as client,
    ):
        worker = ("environment", "--environment", f"remote-gym:{double.url}", "--environment-session-slots", str(CLIENTS))
        await fleet.start("e1", *worker)
        opened = [client.session() for _ in range(CLIENTS)]

        async def play(number: int) -> None:
            session = opened[number]
            await session.request("open", task=Task(key="t", config={"backoff": 0.01}))
            await session.reset()
            if number % 2:
                await session.step("up")

        async with anyio.create_task_group() as group:
            for number in range(CLIENTS):
                group.start_soon(play, number)
        assert len(double.sessions) == CLIENTS
        fleet.kill("e1")
        await fleet.start("e2", *worker)

        async def go_on(number: int) -> None:
            try:
                await opened[number].step("up")
            except SessionFailed as failed:
                assert failed.answer.end == "lost"
            await opened[number].close()

        async with anyio.create_task_group() as group:
            for number in range(CLIENTS):
                group.start_soon(go_on, number)
        assert double.sessions == {}
        assert double.executed["step"] == CLIENTS // 2, "and no step was done again"
