"""An evaluation of more episodes than fit at a time: waiting in line costs none of them its time."""

from __future__ import annotations

import anyio

from fleetbus.config.settings import EnvironmentSettings
from fleetbus_schemas import Action, EpisodeFinished, Task
from fleetbus_workers.environment.adapters.scripted import ScriptedEnvironment
from fleetbus_workers.environment.base import Step
from fleetbus_workers.learner.held_out import MAX_UNCLAIMED, find_newest_version, play
from tests.support.small_deployment import LIMITS, SmallDeployment, build_configuration, small_deployment
from tests.support.virtual_time import virtual_time

EPISODES = 40
TURN_SECONDS = 2.0

anyio_backend = virtual_time


class Slow(ScriptedEnvironment):
    async def step(self, action: Action) -> Step:
        await anyio.sleep(TURN_SECONDS)
        return await super().step(action)


async def evaluated(fleet: SmallDeployment) -> list[EpisodeFinished]:
    return await play(
        fleet.bus,
        fleet.configuration,
        [Task(key=f"held{index}", env="shop", config={"turns": 2}) for index in range(EPISODES)],
        name="eval-x",
        samples=1,
        temperature=0.0,
        published=await find_newest_version(fleet.bus, fleet.subjects, "default"),
        pinned=True,
    )


async def test_more_episodes_than_slots_can_play_within_one_episode_s_limit_are_all_played() -> None:
    assert EPISODES * 2 * TURN_SECONDS > 2 * LIMITS.episode
    async with small_deployment(build_configuration(environment=EnvironmentSettings(slots=1))) as fleet:
        fleet.environment("environment", make=Slow)
        fleet.inference("inference")
        results = await evaluated(fleet)

    assert [result.outcome for result in results] == ["completed"] * EPISODES


async def test_where_nobody_takes_episodes_up_the_evaluation_ends_with_the_first_that_were_asked_for() -> None:
    began = anyio.current_time()
    async with small_deployment() as fleet:
        fleet.inference("inference")
        results = await evaluated(fleet)

    assert [(result.outcome, result.error_class) for result in results] == [("timeout", "unanswered")] * MAX_UNCLAIMED
    assert anyio.current_time() - began < 2 * LIMITS.episode
