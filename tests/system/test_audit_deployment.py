"""The log of a fleet in which every kind of worker was killed balances by itself; on virtual time."""

from __future__ import annotations

from pathlib import Path

import anyio

from fleetbus.audit.run import audit_run
from fleetbus.config.settings import EvaluationSettings, LearnerSettings, RunSettings
from fleetbus_schemas import Task
from fleetbus_workers.learner.curriculum import Curriculum
from fleetbus_workers.learner.scripted import ScriptedTrainer
from tests.support.small_deployment import RUN, build_configuration, small_deployment
from tests.support.virtual_time import virtual_time

STEPS, GROUPS, GROUP_SIZE = 6, 2, 4
TASKS = [Task(key=f"task-{index}", prompt="play") for index in range(4)]

anyio_backend = virtual_time


async def test_the_log_of_a_fleet_whose_workers_were_killed_balances(tmp_path: Path) -> None:
    configuration = build_configuration(
        run=RunSettings(name=RUN, folder=str(tmp_path)),
        learner=LearnerSettings(steps=STEPS, groups=GROUPS, group_size=GROUP_SIZE, checkpoint_every=2, stale_groups="keep"),
        evaluation=EvaluationSettings(episodes=2),
    )
    with anyio.fail_after(3600):
        async with small_deployment(configuration) as fleet:
            doomed = [fleet.environment("environment-0"), fleet.inference("inference-0")]
            doomed.append(fleet.learner("learner-0", trainer=ScriptedTrainer(), curriculum=Curriculum(TASKS, TASKS, seed=1)))
            async with fleet.bus.read([fleet.subjects.actions()]) as reader:
                for _ in range(60):
                    await reader.receive()
            for member in doomed:
                member.kill()
            survivors = [fleet.environment("environment-1"), fleet.inference("inference-1")]
            learner = fleet.learner("learner-1", trainer=ScriptedTrainer(), curriculum=Curriculum(TASKS, TASKS, seed=1))
            await learner.ended.wait()
            assert learner.failure() is None
            await fleet.drain_members(survivors)
            report = await audit_run(fleet.bus, fleet.subjects)
    assert report.findings == ()
    assert report.lineages == ("l1", "l2")
    assert report.attempts.superseded > 0
    assert report.books.trained == STEPS * GROUPS * GROUP_SIZE
