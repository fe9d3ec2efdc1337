"""kill -9 and restart of a real nats-server under a fleet in one process: results and claims are there once."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest

from fleetbus.bus.nats.server import NatsServerProcess
from fleetbus.config.settings import LimitSettings
from fleetbus.log.episodes import decode_entries
from fleetbus_schemas import Observation, Task
from fleetbus_workers.inference.scripted import ScriptedSampler
from tests.support.servers import connect, run_server
from tests.support.small_deployment import RUN, SmallDeployment, build_configuration, small_deployment

pytestmark = pytest.mark.integration

EPISODES = 24
TURNS = 5
RECOVERY_SECONDS = 30.0
"""From the server's return until everything that was under way has its result; some seconds where nothing else runs."""


@asynccontextmanager
async def fleet_on_server(store: Path, *, seconds: float) -> AsyncIterator[tuple[SmallDeployment, NatsServerProcess]]:
    """Two workers of each role on a server of their own; a turn takes so many seconds."""
    with anyio.fail_after(50):
        async with run_server(store) as server:
            configuration = build_configuration(limits=LimitSettings(drain=5))
            async with small_deployment(configuration, connect=lambda name: connect(server.url, run=RUN, worker=name)) as fleet:
                members = [fleet.environment(f"environment-{index}", slots=16) for index in range(2)]
                for index in range(2):
                    sampler = ScriptedSampler(delay=lambda _: seconds)
                    members.append(fleet.inference(f"inference-{index}", sampler=sampler, slots=32))
                await fleet.heard(*members)
                yield fleet, server


async def begin(fleet: SmallDeployment) -> None:
    for index in range(EPISODES):
        await fleet.request(f"e{index}", task=Task(key="task", prompt="play", config={"turns": TURNS}))


async def turns_played(fleet: SmallDeployment, count: int) -> None:
    """Until so many Actions are in the log."""
    async with fleet.bus.read([fleet.subjects.actions()]) as reader:
        for _ in range(count):
            await reader.receive()


async def check_books(fleet: SmallDeployment) -> None:
    results = [result for results in fleet.results.values() for result in results]
    assert Counter(result.episode_id for result in results) == {f"e{index}": 1 for index in range(EPISODES)}
    assert {(result.outcome, result.reward, result.turns) for result in results} == {("completed", 1.0, TURNS)}
    actions = Counter((action.episode_id, action.attempt, action.turn) for action in await fleet.actions())
    assert set(actions.values()) == {1}, "an action is stored twice"
    for index in range(EPISODES):
        claims = await fleet.claims(f"e{index}")
        assert [claim.attempt for claim in claims] == list(range(1, len(claims) + 1)), "a claim is there twice, or missing"


@pytest.mark.parametrize("away_seconds", [0.0, 3.0])
async def test_kill_and_restart_of_the_server_and_every_episode_ends_once(away_seconds: float, tmp_path: Path) -> None:
    async with fleet_on_server(tmp_path, seconds=0.2) as (fleet, server):
        await begin(fleet)
        await turns_played(fleet, 2 * EPISODES)
        assert len(fleet.results) < EPISODES, "everything was over before the kill"
        await server.kill()
        await anyio.sleep(away_seconds)
        await server.restart()
        returned_at = anyio.current_time()
        await fleet.all_results(EPISODES)
        assert anyio.current_time() - returned_at <= RECOVERY_SECONDS
        await check_books(fleet)
        assert not any(member.ended.is_set() for member in fleet.members.values())


async def test_an_action_stored_while_the_environment_worker_was_away_is_found(tmp_path: Path) -> None:
    """Every connection breaks at once while all turns are being sampled; nobody has to sample a turn again."""
    async with fleet_on_server(tmp_path, seconds=0.5) as (fleet, server):
        await begin(fleet)
        await turns_played(fleet, EPISODES)
        await server.kill()
        await server.restart()
        await fleet.all_results(EPISODES)
        await check_books(fleet)
        entries = [entry async for entry in fleet.bus.scan([fleet.subjects.observations()])]
        asked = Counter((each.episode_id, each.attempt, each.turn) for _, each in decode_entries(Observation, entries))
        assert len(asked) == EPISODES * TURNS, "an episode had to begin a turn anew"
