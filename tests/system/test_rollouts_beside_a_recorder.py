"""Rollouts for a trainer of one's own beside a recorder, which makes room in the log while the trainer is busy."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import msgspec

from fleetbus.bus.streams import log_stream
from fleetbus.client.rollouts import RolloutGroup, rollouts
from fleetbus.config.settings import LearnerSettings
from fleetbus_schemas import Task
from fleetbus_workers.inference.scripted import ScriptedSampler
from fleetbus_workers.recorder.worker import RecorderSettings, run_recorder
from tests.support.deployment_member import Member
from tests.support.small_deployment import RUN, SmallDeployment, small_deployment
from tests.support.virtual_time import virtual_time

TASK = Task(key="t", prompt="play")
EPISODES = 8

anyio_backend = virtual_time


@asynccontextmanager
async def fleet_with_recorder(
    folder: Path, *, seconds: float = 1.0, duplicate_window_seconds: float = 120.0
) -> AsyncIterator[SmallDeployment]:
    async with small_deployment() as fleet:
        stream = fleet.server.stream(log_stream(RUN))
        stream.plan = msgspec.structs.replace(stream.plan, duplicate_window_seconds=duplicate_window_seconds)

        async def record(member: Member, bus: Any) -> None:
            await run_recorder(
                bus,
                configuration=fleet.configuration,
                name=member.name,
                drain=member.drain,
                folder=folder,
                settings=RecorderSettings(trim_seconds=1.0, settle_seconds=0),
                runtime=fleet.runtime,
            )

        fleet.start("recorder", "recorder", record)
        fleet.environment("e1")
        fleet.inference("i1", sampler=ScriptedSampler(delay=lambda _: seconds))
        yield fleet


async def group_of_a_busy_trainer(fleet: SmallDeployment, *, archive: str, seconds: float) -> RolloutGroup:
    """What a trainer is given whose process neither hears nor says anything for so long while its episodes are played."""
    configuration = msgspec.structs.replace(fleet.configuration, learner=LearnerSettings(archive=archive))
    async with (
        fleet.server.connect(RUN, worker="trainer") as bus,
        rollouts(bus, configuration, [TASK], group_size=EPISODES, runtime=fleet.runtime) as groups,
    ):
        await anyio.sleep(0.5)
        bus.disconnect()
        await anyio.sleep(seconds)
        bus.reconnect()
        return await anext(aiter(groups))


async def test_what_was_trimmed_before_it_was_read_comes_from_the_archive(tmp_path: Path) -> None:
    with anyio.fail_after(1000):
        async with fleet_with_recorder(tmp_path) as fleet:
            group = await group_of_a_busy_trainer(fleet, archive=str(tmp_path), seconds=300)
            assert len(await fleet.actions()) < 3 * EPISODES
            assert [len(episode.texts) for episode in group.graded] == [3] * EPISODES


async def test_what_was_trimmed_and_cannot_be_read_is_lost_and_says_why(tmp_path: Path) -> None:
    with anyio.fail_after(1000):
        async with fleet_with_recorder(tmp_path) as fleet:
            group = await group_of_a_busy_trainer(fleet, archive="", seconds=300)
            assert group.graded == ()
            for episode in group.episodes:
                assert (episode.outcome, episode.reward, episode.ids) == ("lost", None, ())
                assert "learner.archive" in episode.error


async def test_the_log_keeps_the_actions_of_a_finished_episode_while_they_may_be_read(tmp_path: Path) -> None:
    """Counted from its result: the first ones are older than the duplicate window by then."""
    with anyio.fail_after(1000):
        async with fleet_with_recorder(tmp_path, seconds=7.0, duplicate_window_seconds=30.0) as fleet:
            group = await group_of_a_busy_trainer(fleet, archive="", seconds=46)
            assert [len(episode.texts) for episode in group.graded] == [3] * EPISODES
            await anyio.sleep(60)
            assert len(await fleet.actions()) < 3 * EPISODES
