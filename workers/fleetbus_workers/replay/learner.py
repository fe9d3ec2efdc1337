"""Replay of the learner role: recorded episodes to the same requests, batches, metrics and, on a CPU, the same weights.

Without a trainer it goes as far as the batches: `fleetbus_workers.replay.untrained` stands in for training. Tasks come from
the recorded requests; results are fed and messages compared by `fleetbus_workers.replay.learner_director`. Of a run whose
learner was replaced or started again, each lineage is replayed in turn, on what `fleetbus_workers.replay.inheritance` finds
for it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import cast

import anyio
import anyio.to_thread
import msgspec

from fleetbus.bus.base import Bus
from fleetbus.config.run_folder import run_folder
from fleetbus.config.settings import Configuration, WeightsSettings
from fleetbus.recording import Recording
from fleetbus.runtime import Runtime
from fleetbus_workers.learner.base import Trainer
from fleetbus_workers.learner.curriculum import Curriculum
from fleetbus_workers.learner.worker import run_learner
from fleetbus_workers.replay.inheritance import Inheritance
from fleetbus_workers.replay.learner_book import Lineage, read_lineages
from fleetbus_workers.replay.learner_director import LearnerDirector
from fleetbus_workers.replay.progress import Progress
from fleetbus_workers.replay.report import TRAINING, Report
from fleetbus_workers.replay.stage import PATIENCE_SECONDS, WORKER, Pace, Stage, perform, staged
from fleetbus_workers.replay.told import RecordedTasks, check_images, read_told
from fleetbus_workers.replay.untrained import RecordedTrainer


async def replay_learner(
    recording: Recording,
    make_trainer: Callable[[], Trainer] | None,
    *,
    configuration: Configuration,
    folder: Path,
    speed: float | None = None,
    ignored: frozenset[str] = frozenset(),
    patience_seconds: float = PATIENCE_SECONDS,
    progress: Progress | None = None,
) -> Report:
    """Train the recorded episodes again, each lineage with a fresh trainer (made in a thread), and compare everything that
    learners publish. Without trainers the replay ends at the batches, and what training computes is taken from the recording.

    Weights and checkpoints are written below ``folder``. Lineages after a difference, or whose checkpoint was not made again,
    are left out and named. Raises `UserError` when the recording does not hold the beginning of the training.
    """
    report = Report(role="learner", recorded_seconds=recording.seconds)
    lineages = read_lineages(recording)
    stories = read_told(recording)
    check_images(recording, stories.values())
    run = msgspec.structs.replace(configuration.run, folder=str(folder))
    configuration = msgspec.structs.replace(configuration, run=run)
    if make_trainer is None:  # differences to weights that nobody has cannot be made
        ignored |= {"PolicyPublished.size_bytes"} if configuration.weights.full_every > 1 else set()
        configuration = msgspec.structs.replace(configuration, weights=WeightsSettings())
    files = run_folder(configuration.run)
    for place in (files.weights, files.checkpoints):
        await anyio.Path(place).mkdir(parents=True, exist_ok=True)
    tasks = RecordedTasks(stories.values())
    progress = progress or Progress()
    progress.expect(sum(len(lineage.published) for lineage in lineages))
    pace, reason = Pace(recording, speed), ""
    for lineage in lineages:
        inheritance = Inheritance(recording, lineages, lineage, stories, files.checkpoints)
        reason = reason or inheritance.missing
        if reason:
            _leave_out(report, lineage, reason)
            continue
        if len(lineages) > 1:
            report.notes["lineages that were replayed, each from where it began"] += 1
        own = _steps_of(configuration, lineage)
        async with staged(recording, own, pools=(own.run.pool,), policies=(own.run.policy,)) as stage:
            inherited = inheritance.lay(stage)
            director = LearnerDirector(
                stage, lineage, stories, report, pace, ignored, patience_seconds, inherited=inherited, progress=progress
            )
            await _train(stage, director, make_trainer, tasks, report)
        if report.differences:
            reason = f"lineage {lineage.name} differs, and it stands on that"
    return report


async def _train(
    stage: Stage,
    director: LearnerDirector,
    make_trainer: Callable[[], Trainer] | None,
    tasks: RecordedTasks,
    report: Report,
) -> None:
    """One lineage, whose trainer is gone with it."""
    if make_trainer is not None:
        trainer = await anyio.to_thread.run_sync(make_trainer)
    else:
        trainer = director.untrained(masked=stage.configuration.algorithm.mask_truncated_completions)

    async def work(bus: Bus, drain: anyio.Event) -> None:
        await run_learner(
            bus,
            configuration=stage.configuration,
            name=WORKER,
            drain=director.drain,
            trainer=trainer,
            curriculum=cast(Curriculum, tasks),
            runtime=Runtime(offload=director.offload),
        )

    await perform(stage, work, director.direct)
    _tell(report, director, trainer)


def _steps_of(configuration: Configuration, lineage: Lineage) -> Configuration:
    """A run that ended may have been told to go on: the recorded configuration is that of its last start."""
    steps = lineage.last_step if lineage.is_whole else configuration.learner.steps
    return msgspec.structs.replace(configuration, learner=msgspec.structs.replace(configuration.learner, steps=steps))


def _leave_out(report: Report, lineage: Lineage, reason: str) -> None:
    first, last = lineage.start + 1, lineage.last_step
    if first > last:
        report.skipped[f"messages of lineage {lineage.name}, which trained nothing: {reason}"] = len(lineage.published)
    else:
        span = f"{first} to {last}" if first < last else f"{last}"
        report.skipped[f"steps of lineage {lineage.name} ({span}): {reason}"] = last + 1 - first


def _tell(report: Report, director: LearnerDirector, trainer: Trainer) -> None:
    shown = "checked: requests, groups, advantages, batches, evaluations, lineage"
    if isinstance(trainer, RecordedTrainer):
        report.checked = f"{shown}; not checked: loss, gradients, weights (--until)"
        report.notes["training sequences that are the recorded ones, token by token"] += trainer.sequences
        report.notes["sampled tokens in them"] += trainer.tokens
    else:
        report.checked = f"{shown}, and what training makes of them"
        report.measured[TRAINING] = report.measured.get(TRAINING, 0.0) + director.seconds.get("train", 0.0)
