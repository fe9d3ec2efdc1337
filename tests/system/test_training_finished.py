"""All that stands in the log when training ends is accounted for, also by a learner that began at the last step."""

from __future__ import annotations

from pathlib import Path

import anyio

from fleetbus.bus.memory import MemoryServer
from fleetbus.bus.streams import plan_run
from fleetbus.concurrency.runtime import Runtime
from fleetbus.config.run_folder import run_folder
from fleetbus.config.settings import Configuration, EvaluationSettings, LearnerSettings, RunSettings
from fleetbus.log.episodes import decode_entries
from fleetbus_schemas import (
    ActionReference,
    CheckpointStored,
    EpisodeFinished,
    EpisodeRequested,
    LineageStarted,
    Message,
    Subjects,
    Task,
    TrainingFinished,
    encode,
)
from fleetbus_schemas.channels import STORED
from fleetbus_workers.learner.checkpoints import Checkpoint, write_checkpoint
from fleetbus_workers.learner.curriculum import Curriculum
from fleetbus_workers.learner.scripted import ScriptedTrainer
from fleetbus_workers.learner.worker import run_learner
from tests.support.small_deployment import run_inline
from tests.support.virtual_time import virtual_time

RUN = "ends"
SUBJECTS = Subjects(RUN)
GROUPS = 50
"""More than a learner reads on the side while it finishes."""

anyio_backend = virtual_time


def entries_of(group: int) -> list[tuple[str, Message]]:
    """Two requests of one group and their results."""
    found: list[tuple[str, Message]] = []
    for index in range(2):
        episode, group_id = f"g{group:06d}-{index}", f"g{group:06d}"
        request = EpisodeRequested(
            episode_id=episode, group_id=group_id, sample_index=index, split="train", task=Task(key="t"), policy="default",
            deadline_ns=1 << 62, lineage="l1", group_size=2,
        )  # fmt: skip
        result = EpisodeFinished(
            episode_id=episode, group_id=group_id, attempt=1, outcome="completed", worker="e", reward=float(index),
            actions=(ActionReference(sequence=1, lane="e0", turn=0),), policy_versions=(0,),
        )  # fmt: skip
        found += [(SUBJECTS.task("default", episode), request), (SUBJECTS.episode(episode), result)]
    return found


async def test_a_learner_that_begins_at_the_last_step_excludes_what_nobody_trained(tmp_path: Path) -> None:
    configuration = Configuration(
        run=RunSettings(name=RUN, folder=str(tmp_path)),
        learner=LearnerSettings(steps=2, groups=1, group_size=2),
        evaluation=EvaluationSettings(episodes=0),
    )
    folder = run_folder(configuration.run)
    folder.weights.mkdir(parents=True)
    checkpoint = Checkpoint(lineage="l1", step=2, version=2, floor=1, settled=(), next_group=GROUPS)
    path = write_checkpoint(folder.checkpoints, checkpoint, ScriptedTrainer()).path
    tasks = [Task(key="t")]
    with anyio.fail_after(600):
        async with MemoryServer().connect(RUN, worker="learner") as bus:
            await bus.declare(plan_run(RUN, lanes=1))
            stored = CheckpointStored(lineage="l1", step=2, version=2, file=str(path), floor=1)
            for entry in (LineageStarted(lineage="l1", worker="w"), stored):
                await bus.publish(SUBJECTS.train("default"), encode(entry))
            for group in range(GROUPS):
                for subject, message in entries_of(group):
                    await bus.publish(subject, encode(message))
            await run_learner(
                bus, configuration=configuration, name="learner", drain=anyio.Event(), trainer=ScriptedTrainer(),
                curriculum=Curriculum(tasks, [], seed=1), runtime=Runtime(offload=run_inline),
            )  # fmt: skip
            book = await bus.history([SUBJECTS.train("default")])
    ((_, finished),) = decode_entries(TrainingFinished, book, beside=STORED["train"])
    excluded = {exclusion.episode_id: exclusion.reason for exclusion in finished.excluded}
    assert excluded == {f"g{group:06d}-{index}": "training_finished" for group in range(GROUPS) for index in range(2)}
