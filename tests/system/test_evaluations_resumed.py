"""Evaluations that were asked for are played, also when the learner was killed in one."""

from __future__ import annotations

from pathlib import Path

import anyio
import pytest

from fleetbus.config.settings import EpisodeSettings, EvaluationSettings, LearnerSettings, LimitSettings, RunSettings
from fleetbus.log.episodes import decode_entries
from fleetbus_schemas import CheckpointStored, EvaluationFinished, Message, Task
from fleetbus_schemas.channels import STORED
from fleetbus_workers.environment.adapters.scripted import ScriptedEnvironment
from fleetbus_workers.inference.scripted import ScriptedSampler
from fleetbus_workers.learner.curriculum import Curriculum
from fleetbus_workers.learner.scripted import ScriptedTrainer
from tests.support.small_deployment import RUN, SmallDeployment, build_configuration, small_deployment
from tests.support.virtual_time import virtual_time

TASKS = [Task(key=f"task-{index}", prompt="play", config={"turns": 2}) for index in range(8)]

anyio_backend = virtual_time


async def until_entry(fleet: SmallDeployment, kind: type[Message], step: int) -> None:
    async with fleet.bus.read([fleet.subjects.train("default")]) as reader:
        while True:
            for _, found in decode_entries(kind, [await reader.receive()], beside=STORED["train"]):
                if getattr(found, "step", -1) == step:
                    return


@pytest.mark.parametrize("kind", [CheckpointStored, EvaluationFinished], ids=["before it is stored", "after it"])
async def test_an_evaluation_in_which_the_learner_is_killed_is_played_again(kind: type[Message], tmp_path: Path) -> None:
    configuration = build_configuration(
        run=RunSettings(name=RUN, folder=str(tmp_path)),
        limits=LimitSettings(),
        episode=EpisodeSettings(max_turns=60),
        learner=LearnerSettings(steps=4, groups=2, group_size=2, checkpoint_every=2),
        evaluation=EvaluationSettings(episodes=2, every=2, greedy=False),
    )
    with anyio.fail_after(3000):
        async with small_deployment(configuration, published=False) as fleet:
            fleet.environment("environment-0", make=ScriptedEnvironment)
            fleet.inference("inference-0", sampler=ScriptedSampler(delay=lambda _: 1.0))
            first = fleet.learner("learner-0", trainer=ScriptedTrainer(), curriculum=Curriculum(TASKS, TASKS, seed=1))
            await until_entry(fleet, kind, 2)
            first.kill()
            second = fleet.learner("learner-1", trainer=ScriptedTrainer(), curriculum=Curriculum(TASKS, TASKS, seed=1))
            await second.ended.wait()
            entries = await fleet.bus.history([fleet.subjects.train("default")])
    names = [entry.name for _, entry in decode_entries(EvaluationFinished, entries, beside=STORED["train"])]
    assert names == ["start", "step2", "end"]
