"""The checkpoint that a stopped learner leaves behind: a checkpoint of its last step, or by choice the one before."""

from __future__ import annotations

from pathlib import Path

import anyio
import pytest

from fleetbus.config.settings import EvaluationSettings, LearnerSettings, RunSettings
from fleetbus.log.episodes import decode_entries
from fleetbus_schemas import CheckpointStored, StepTrained, Task
from fleetbus_schemas.channels import STORED
from fleetbus_workers.learner.curriculum import Curriculum
from fleetbus_workers.learner.scripted import ScriptedTrainer
from tests.support.small_deployment import RUN, build_configuration, small_deployment


@pytest.mark.timeout(120)
@pytest.mark.parametrize("stores", [True, False], ids=["stored", "left out"])
async def test_a_learner_that_is_told_to_stop_stores_a_checkpoint_unless_it_is_to_go_on_from_the_one_before(
    tmp_path: Path, stores: bool
) -> None:
    configuration = build_configuration(
        run=RunSettings(name=RUN, folder=str(tmp_path)),
        learner=LearnerSettings(steps=500, groups=1, group_size=2, checkpoint_every=499, checkpoint_at_stop=stores),
        evaluation=EvaluationSettings(episodes=0),
    )
    tasks = [Task(key="t", prompt="play")]
    with anyio.fail_after(60):
        async with small_deployment(configuration, published=False) as fleet:
            workers = [fleet.environment("environment-0"), fleet.inference("inference-0")]
            learner = fleet.learner("learner-0", trainer=ScriptedTrainer(), curriculum=Curriculum(tasks, [], seed=1))
            async with fleet.bus.read([fleet.subjects.train("default")]) as reader:
                while not list(decode_entries(StepTrained, [await reader.receive()], beside=STORED["train"])):
                    pass
            learner.drain.set()
            await learner.ended.wait()
            await fleet.drain_members(workers)
            entries = [entry async for entry in fleet.bus.scan([fleet.subjects.train("default")])]
    steps = [step.step for _, step in decode_entries(StepTrained, entries, beside=STORED["train"])]
    stored = [checkpoint.step for _, checkpoint in decode_entries(CheckpointStored, entries, beside=STORED["train"])]
    assert 1 <= steps[-1] < 499 and stored == (steps[-1:] if stores else [])
