"""Clients of step-wise sessions that come before any worker, over a real server: the first heartbeat is enough for all."""

from __future__ import annotations

from pathlib import Path

import anyio
import pytest

from fleetbus.client.sessions import sessions
from fleetbus.config.settings import EnvironmentSettings
from fleetbus_workers.environment.stepwise.host import SessionHost
from tests.support.servers import connect, run_server
from tests.support.small_deployment import RUN, build_configuration, small_deployment
from tests.support.stepwise_fixtures import TASK, World

CLIENTS = 32
LIMIT_SECONDS = 1.0


@pytest.mark.integration
async def test_clients_that_came_before_any_worker_have_their_sessions_within_a_second_of_its_first_heartbeat(
    tmp_path: Path,
) -> None:
    world = World()
    opened_at: list[float] = []
    configuration = build_configuration(environment=EnvironmentSettings(slots=8, session_slots=CLIENTS))
    async with (
        run_server(tmp_path / "store", monitor_port=None) as server,
        small_deployment(configuration, connect=lambda name: connect(server.url, run=RUN, worker=name)) as fleet,
        connect(server.url, run=RUN, worker="gateway-1") as bus,
        sessions(bus, fleet.subjects) as client,
    ):

        async def open_one() -> None:
            async with client.open(TASK) as session:
                await session.reset()
                opened_at.append(anyio.current_time())
                if len(opened_at) == CLIENTS:
                    all_open.set()
                await all_open.wait()

        all_open = anyio.Event()
        with anyio.fail_after(30):
            async with anyio.create_task_group() as group:
                for _ in range(CLIENTS):
                    group.start_soon(open_one)
                await anyio.sleep(0.2)  # they have found out by now that nobody is there
                worker = fleet.environment("environment-1", make=world)
                await fleet.heard(worker)
                heard_at = anyio.current_time()
    assert max(opened_at) - heard_at < LIMIT_SECONDS
    assert world.opened == CLIENTS


async def test_a_worker_offers_slots_for_sessions_only_once_calls_arrive(tmp_path: Path) -> None:
    """Its first client would find nobody, take it for dead, and wait for its next heartbeat."""
    held = anyio.Event()
    run = SessionHost.run

    async def late(host: SessionHost, **options: object) -> None:
        await held.wait()
        await run(host, **options)  # type: ignore[arg-type]

    async with small_deployment(build_configuration(environment=EnvironmentSettings(slots=8, session_slots=4))) as fleet:
        SessionHost.run = late  # type: ignore[method-assign, assignment]
        try:
            worker = fleet.environment("e1", make=World())
            await fleet.heard(worker)
            assert fleet.beats["e1"].session_slots == 0
            held.set()
            with anyio.fail_after(1):
                await fleet.until(lambda: fleet.beats["e1"].session_slots == 4)
        finally:
            SessionHost.run = run  # type: ignore[method-assign]
