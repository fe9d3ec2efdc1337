"""Replay of the learner role: recorded episodes to the same requests, batches, metrics and, on a CPU, the same weights.

Without a trainer it goes as far as the batches: `workers.replay.untrained` stands in for training. Tasks come from the recorded
requests; results are fed and messages compared by `workers.replay.learner_director`.
"""

from __future__ import annotations

from pathlib import Path
from typing import cast

import anyio
import msgspec

from fleetbus.bus.base import Bus
from fleetbus.config.settings import Configuration, WeightsSettings
from fleetbus.ports import Ports
from fleetbus.recording import Recording
from workers.learner.base import Trainer
from workers.learner.curriculum import Curriculum
from workers.learner.worker import run_learner
from workers.replay.learner_book import first_lineage
from workers.replay.learner_director import LearnerDirector
from workers.replay.report import TRAINING, Report
from workers.replay.stage import PATIENCE_SECONDS, WORKER, Pace, perform, staged
from workers.replay.told import RecordedTasks, check_images, read_told
from workers.replay.untrained import RecordedTrainer


async def replay_learner(
    recording: Recording,
    trainer: Trainer | None,
    *,
    configuration: Configuration,
    folder: Path,
    speed: float | None = None,
    ignored: frozenset[str] = frozenset(),
    patience_seconds: float = PATIENCE_SECONDS,
) -> Report:
    """Train the recorded episodes again with a fresh ``trainer`` and compare everything the learner publishes. Without a
    trainer the replay ends at the batches, and what training computes is taken from the recording.

    Weights and checkpoints are written below ``folder``. Of a run whose learner was replaced, the first lineage is replayed.
    Raises `UserError` when the recording does not hold the beginning of the training.
    """
    report = Report(role="learner", recorded_seconds=recording.seconds)
    expected = first_lineage(recording)
    stories = read_told(recording)
    check_images(recording, stories.values())
    run = msgspec.structs.replace(configuration.run, folder=str(folder))
    configuration = msgspec.structs.replace(configuration, run=run)
    if trainer is None:  # differences to weights that nobody has cannot be made
        ignored |= {"PolicyPublished.size_bytes"} if configuration.weights.full_every > 1 else set()
        configuration = msgspec.structs.replace(configuration, weights=WeightsSettings())
    async with staged(recording, configuration, pools=(run.pool,), policies=(run.policy,)) as stage:
        director = LearnerDirector(stage, expected, stories, report, Pace(recording, speed), ignored, patience_seconds)
        training = trainer or director.untrained(masked=configuration.algorithm.overlong == "mask")
        for files in ("weights", "checkpoints"):
            await anyio.Path(folder / run.name / files).mkdir(parents=True, exist_ok=True)

        async def work(bus: Bus, drain: anyio.Event) -> None:
            await run_learner(
                bus,
                configuration=configuration,
                name=WORKER,
                drain=drain,
                trainer=training,
                curriculum=cast(Curriculum, RecordedTasks(stories.values())),
                ports=Ports(offload=director.offload),
            )

        await perform(stage, work, director.direct)
    if trainer is not None:
        report.checked = "checked: requests, groups, advantages, batches, evaluations, lineage, and what training makes of them"
        report.measured = {TRAINING: director.seconds.get("train", 0.0)}
    if isinstance(training, RecordedTrainer):
        _tell_of_batches(report, training)
    return report


def _tell_of_batches(report: Report, training: RecordedTrainer) -> None:
    report.checked = (
        "checked: requests, groups, advantages, batches, evaluations, lineage; not checked: loss, gradients, weights (--until)"
    )
    report.notes["training sequences that are the recorded ones, token by token"] += training.sequences
    report.notes["sampled tokens in them"] += training.tokens
