"""The end of named sessions that nobody uses: none waits for another's end, and none ends the gateway."""

from __future__ import annotations

from typing import cast

import anyio

from fleetbus_workers.gateway.openenv_episode import OpenEnvEpisode
from fleetbus_workers.gateway.openenv_sessions import OpenEnvSessions
from tests.support.virtual_time import virtual_time


class SlowClosingEpisode:
    """Stands in for the environment of a session: it is there, and takes its time to end."""

    is_active = True

    def __init__(self, name: str, seconds: float) -> None:
        self.name = name
        self.closed_at: float | None = None
        self._seconds = seconds

    async def attach(self) -> bool:
        await anyio.lowlevel.checkpoint()
        return True

    async def close(self) -> None:
        await anyio.sleep(self._seconds)
        self.closed_at = anyio.current_time()


anyio_backend = virtual_time


class SessionsFixture:
    """Two places, and sessions that end after a minute without a call; those called ``slow`` take 40 s for it."""

    def __init__(self) -> None:
        self.made: list[SlowClosingEpisode] = []
        self.sessions = OpenEnvSessions(self._make, max_sessions=2, idle_seconds=60, resume_seconds=60)

    def _make(self, name: str) -> OpenEnvEpisode:
        self.made.append(SlowClosingEpisode(name, 40 if name == "slow" else 0))
        return cast("OpenEnvEpisode", self.made[-1])

    async def use(self, name: str) -> None:
        async with self.sessions.use(name, make=True):
            await anyio.lowlevel.checkpoint()


async def test_a_session_that_takes_long_to_end_holds_up_no_other() -> None:
    ground = SessionsFixture()
    async with anyio.create_task_group() as group:
        group.start_soon(ground.sessions.run)
        began = anyio.current_time()
        await ground.use("slow")
        await ground.use("quick")
        await anyio.sleep(70)
        slow, quick = ground.made
        assert slow.closed_at is None and quick.closed_at is not None
        assert quick.closed_at - began < 65
        group.cancel_scope.cancel()


async def test_a_session_that_its_client_closes_while_another_ends_harms_no_gateway_that_is_full() -> None:
    ground = SessionsFixture()
    async with anyio.create_task_group() as group:
        await ground.use("slow")
        await ground.use("quick")
        await anyio.sleep(60)
        group.start_soon(ground.sessions.run)
        await anyio.sleep(2)
        await ground.sessions.close("quick")
        for name in ("a", "b"):  # every place is taken again
            await ground.use(name)
        await anyio.sleep(110)
        assert {made.name for made in ground.made} == {"slow", "quick", "a", "b"}
        assert all(made.closed_at is not None for made in ground.made)
        group.cancel_scope.cancel()
