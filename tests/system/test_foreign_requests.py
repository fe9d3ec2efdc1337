"""Requests that somebody else made for training stand in the same log; the run's own learner leaves them alone."""

from __future__ import annotations

from pathlib import Path

import anyio

from fleetbus.config.settings import EvaluationSettings, LearnerSettings, LimitSettings, RunSettings
from fleetbus_schemas import Task
from fleetbus_workers.learner.curriculum import Curriculum
from fleetbus_workers.learner.scripted import ScriptedTrainer
from tests.support.small_deployment import RUN, build_configuration, small_deployment
from tests.support.virtual_time import virtual_time

TASKS = [Task(key=f"task-{index}", prompt="play", config={"turns": 2}) for index in range(40)]

anyio_backend = virtual_time


async def test_a_learner_begins_beside_requests_of_others_and_does_not_train_them(tmp_path: Path) -> None:
    configuration = build_configuration(
        run=RunSettings(name=RUN, folder=str(tmp_path)),
        limits=LimitSettings(),
        learner=LearnerSettings(steps=2, groups=2, group_size=2, checkpoint_every=1, max_staleness=1),
        evaluation=EvaluationSettings(episodes=0),
    )
    trainer = ScriptedTrainer()
    with anyio.fail_after(900):
        async with small_deployment(configuration) as fleet:
            await fleet.request("theirs")
            fleet.environment("environment-0")
            fleet.inference("inference-0")
            learner = fleet.learner("learner-0", trainer=trainer, curriculum=Curriculum(TASKS, [], seed=1))
            await learner.ended.wait()
            assert learner.error is None
            assert (await fleet.result("theirs")).outcome == "completed"
    assert trainer.updates == 2
    assert "theirs" not in trainer.trained
