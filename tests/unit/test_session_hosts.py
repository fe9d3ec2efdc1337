"""Workers that host sessions: those heard of lately, the one with most room first, and nobody else is remembered."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import pytest

from fleetbus.bus.memory import MemoryServer
from fleetbus.bus.memory_bus import MemoryBus
from fleetbus.bus.streams import plan_run
from fleetbus.client.session_hosts import MOST_HOSTS, SessionHosts
from fleetbus.client.sessions import sessions
from fleetbus.concurrency.task_groups import open_first_error_task_group
from fleetbus.delivery.heartbeats import LOST_AFTER_SECONDS
from fleetbus.errors import BusClosed
from fleetbus_schemas import Heartbeat, Subjects, encode
from tests.support.virtual_time import virtual_time

SUBJECTS = Subjects("r")

anyio_backend = virtual_time


@asynccontextmanager
async def listening() -> AsyncIterator[tuple[MemoryBus, SessionHosts]]:
    async with MemoryServer().connect("r") as bus, anyio.create_task_group() as group:
        hosts = SessionHosts(bus, SUBJECTS)
        group.start_soon(hosts.run)
        await anyio.wait_all_tasks_blocked()
        yield bus, hosts
        group.cancel_scope.cancel()


async def beat(bus: MemoryBus, worker: str, *, sessions: int = 0, draining: bool = False, slots: int = 8) -> None:
    heartbeat = Heartbeat(role="environment", worker=worker, session_slots=slots, sessions=sessions, draining=draining)
    await bus.broadcast(SUBJECTS.heartbeat("environment", worker), encode(heartbeat))
    await anyio.wait_all_tasks_blocked()


async def test_the_worker_with_most_room_is_chosen_until_it_drains_or_falls_silent() -> None:
    async with listening() as (bus, hosts):
        await beat(bus, "full", sessions=7)
        await beat(bus, "empty")
        assert await hosts.choose() == "empty"
        await beat(bus, "empty", draining=True)
        assert await hosts.choose() == "full"
        await anyio.sleep(LOST_AFTER_SECONDS + 1)
        with anyio.move_on_after(1) as waited:
            await hosts.choose()
        assert waited.cancelled_caught, "nobody was heard of lately"


async def test_workers_that_were_killed_are_forgotten_however_many_there_were() -> None:
    """Each start of a worker has a name of its own, and a gateway lives for months."""
    async with listening() as (bus, hosts):
        for number in range(200):
            await beat(bus, f"w{number}")
            await hosts.choose()
            await anyio.sleep(LOST_AFTER_SECONDS / 2)
        assert len(hosts._hosts) <= 3
        assert len(hosts._sent) <= 3


async def test_one_heartbeat_wakes_all_who_wait_for_a_worker() -> None:
    async with listening() as (bus, hosts), anyio.create_task_group() as group:
        chosen: list[str] = []

        async def choose() -> None:
            chosen.append(await hosts.choose())

        for _ in range(32):
            group.start_soon(choose)
        await anyio.wait_all_tasks_blocked()
        await beat(bus, "first")
        assert chosen == ["first"] * 32
        group.cancel_scope.cancel()


async def test_a_worker_with_less_than_no_slots_or_sessions_is_not_preferred_and_names_without_end_are_forgotten() -> None:
    async with listening() as (bus, hosts):
        await beat(bus, "a-worker")
        await beat(bus, "odd", slots=-8)
        await beat(bus, "odder", sessions=-8)
        assert await hosts.choose() == "a-worker"
        for number in range(MOST_HOSTS + 9):
            hosts._on_heartbeat(Heartbeat(role="environment", worker=f"w{number}", session_slots=1))
        assert len(hosts._hosts) == MOST_HOSTS


async def test_whoever_waits_for_a_worker_is_told_once_heartbeats_are_not_followed_any_more() -> None:
    """Else the process that closes its connection waits as long as they would."""
    with pytest.raises(BusClosed):
        async with open_first_error_task_group() as waiting, listening() as (_, hosts):
            waiting.start_soon(hosts.choose)
            await anyio.wait_all_tasks_blocked()
    with pytest.raises(BusClosed):
        await hosts.choose()


async def test_closing_a_session_whose_client_has_ended_is_no_error() -> None:
    """Cancelled together with its client, it ended with this error, and not as cancelled."""
    server = MemoryServer()
    server.declare(plan_run("r", lanes=1))
    async with server.connect("r", worker="w") as bus:
        async with sessions(bus, SUBJECTS) as client:
            session = client.session()
        await session.close()
