"""Episodes that a trainer cannot take never reach it: the learner excludes them, says why, and continues."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import anyio

from fleetbus.audit.run import audit_run
from fleetbus.config.settings import EvaluationSettings, LearnerSettings, LimitSettings, RunSettings
from fleetbus.log.episodes import decode_entries
from fleetbus_schemas import StepTrained, Task
from fleetbus_workers.learner.curriculum import Curriculum
from fleetbus_workers.learner.scripted import ScriptedTrainer
from tests.support.small_deployment import RUN, build_configuration, small_deployment
from tests.support.virtual_time import virtual_time

TASKS = [Task(key=f"task-{index}", prompt="play", config={"turns": 2}) for index in range(40)]

anyio_backend = virtual_time


class NarrowAtFirst(ScriptedTrainer):
    """Has an embedding for one id only until it is asked again."""

    times = 0

    @property
    def vocabulary(self) -> int:  # type: ignore[override]
        self.times += 1
        return 1 if self.times == 1 else 0


async def test_a_batch_that_the_trainer_cannot_be_given_is_excluded_and_the_next_one_trained(tmp_path: Path) -> None:
    configuration = build_configuration(
        run=RunSettings(name=RUN, folder=str(tmp_path)),
        limits=LimitSettings(),
        learner=LearnerSettings(steps=2, groups=2, group_size=2, checkpoint_every=2, max_staleness=1),
        evaluation=EvaluationSettings(episodes=0),
    )
    trainer = NarrowAtFirst()
    with anyio.fail_after(3000):
        async with small_deployment(configuration, published=False) as fleet:
            fleet.environment("environment-0")
            fleet.inference("inference-0")
            learner = fleet.learner("learner-0", trainer=trainer, curriculum=Curriculum(TASKS, [], seed=1))
            await learner.ended.wait()
            assert learner.error is None
            report = await audit_run(fleet.bus, fleet.subjects)
            book = [entry async for entry in fleet.bus.scan([fleet.subjects.train("default")])]
    assert report.balanced, report.findings
    steps = [step for entry in book for _, step in decode_entries(StepTrained, [entry], beside=())]
    reasons = Counter(each.reason for step in steps for each in step.excluded)
    assert (trainer.updates, reasons["actions_broken"]) == (2, 4)
