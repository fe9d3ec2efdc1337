"""Pausing admission: what was requested is played and trained, nothing new is requested; on virtual time."""

from __future__ import annotations

from pathlib import Path

import anyio
import pytest

from fleetbus.audit.run import audit_run
from fleetbus.config.settings import Configuration, EvaluationSettings, LearnerSettings, RunSettings
from fleetbus.delivery.cancel import pause_admission
from fleetbus_schemas import Task
from fleetbus_workers.learner.curriculum import Curriculum
from fleetbus_workers.learner.scripted import ScriptedTrainer
from tests.support.small_deployment import RUN, build_configuration, small_deployment
from tests.support.virtual_time import virtual_time

STEPS, GROUPS, GROUP_SIZE = 8, 2, 4
TASKS = [Task(key=f"task-{index}", prompt="play") for index in range(4)]

anyio_backend = virtual_time


@pytest.fixture
def configuration(tmp_path: Path) -> Configuration:
    return build_configuration(
        run=RunSettings(name=RUN, folder=str(tmp_path)),
        learner=LearnerSettings(steps=STEPS, groups=GROUPS, group_size=GROUP_SIZE),
        evaluation=EvaluationSettings(episodes=0),
    )


@pytest.mark.integration
async def test_a_paused_learner_requests_nothing_until_it_is_resumed_and_trains_on(
    configuration: Configuration,
) -> None:
    with anyio.fail_after(3600):
        async with small_deployment(configuration) as fleet:
            assert await pause_admission(fleet.bus, fleet.subjects, is_paused=True) is None, "no learner is there"
            workers = [fleet.environment("environment-0"), fleet.inference("inference-0")]
            learner = fleet.learner("learner-0", trainer=ScriptedTrainer(), curriculum=Curriculum(TASKS, TASKS, seed=1))
            await fleet.all_results(GROUP_SIZE)
            for _ in range(2):  # a repeated request changes nothing
                assert await pause_admission(fleet.bus, fleet.subjects, is_paused=True) == "learner-0"
            await fleet.until(lambda: fleet.beats["learner-0"].paused)
            await anyio.sleep(600)
            played = len(fleet.results)
            assert 0 < played < STEPS * GROUPS * GROUP_SIZE
            await anyio.sleep(600)
            assert len(fleet.results) == played
            assert not (await fleet.control(workers[0], "pause")).done, "an environment worker has nothing to pause"
            assert await pause_admission(fleet.bus, fleet.subjects, is_paused=False) == "learner-0"
            await learner.ended.wait()
            assert learner.failure() is None
            await fleet.drain_members(workers)
            report = await audit_run(fleet.bus, fleet.subjects)
    assert report.findings == ()
    assert report.books.trained == STEPS * GROUPS * GROUP_SIZE


async def test_a_paused_learner_drains(configuration: Configuration) -> None:
    with anyio.fail_after(3600):
        async with small_deployment(configuration) as fleet:
            learner = fleet.learner("learner-0", trainer=ScriptedTrainer(), curriculum=Curriculum(TASKS, TASKS, seed=1))
            await fleet.heard(learner)
            assert (await fleet.control(learner, "pause")).done
            assert (await fleet.control(learner, "drain")).done
            await learner.ended.wait()
            assert learner.failure() is None
