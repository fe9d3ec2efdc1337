"""Replays the learners of a recorded run: each policy's lineages in turn, on what each found when it began."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import cast

import anyio
import anyio.to_thread
import msgspec

from fleetbus.bus.base import Bus
from fleetbus.concurrency.runtime import Runtime
from fleetbus.config.run_folder import policy_folder
from fleetbus.config.seats import configure_learner, find_joined_policy, list_trained_seats
from fleetbus.config.settings import Configuration, WeightsSettings
from fleetbus.errors import UserError
from fleetbus.recording import Recording
from fleetbus.recording.objects import find_referenced_objects
from fleetbus_workers.learner.base import Trainer
from fleetbus_workers.learner.curriculum import Curriculum
from fleetbus_workers.learner.worker import run_learner
from fleetbus_workers.replay.driver import ReplayContext
from fleetbus_workers.replay.joined_learner import JoinedLearnerDriver
from fleetbus_workers.replay.learner_driver import LearnerDriver, RecordedTasks
from fleetbus_workers.replay.options import apply_settings
from fleetbus_workers.replay.recorded_choices import take_harmless_settings
from fleetbus_workers.replay.recorded_episode import RecordedEpisode, read_episodes
from fleetbus_workers.replay.recorded_judge import find_recorded_group_judge
from fleetbus_workers.replay.recorded_lineages import Lineage, read_lineages
from fleetbus_workers.replay.recorded_trainer import RecordedTrainer
from fleetbus_workers.replay.replay_environment import WORKER, open_replay_environment
from fleetbus_workers.replay.report import TRAINING, Report
from fleetbus_workers.replay.resume_state import ResumeState

MakeTrainer = Callable[[Configuration], Trainer]


async def replay_learner(context: ReplayContext, make_trainer: MakeTrainer | None, *, folder: Path) -> None:
    """Train the recorded episodes again, each lineage with its own settings and a fresh trainer (made in a thread), and compare
    everything that learners publish, those of other policies after the run's own. Without trainers what training computes is
    taken from the recording.

    Weights and checkpoints are written below ``folder``. Lineages after a difference, or whose checkpoint was not made again,
    are left out and named. Raises `UserError` when the recording does not hold the beginning of the training.
    """
    recording, report, own = context.recording, context.report, context.configuration
    joined = [configure_learner(own, seat) for seat in list_trained_seats(own.run)]
    learners = [(own, read_lineages(recording)), *((each, read_lineages(recording, each.run.policy)) for each in joined)]
    episodes = {name: each for name, each in read_episodes(recording.entries).items() if each.request is not None}
    check_images(recording, episodes.values())
    if make_trainer is None and own.weights.full_every > 1:
        context.ignore("PolicyPublished.size_bytes")  # the recorded one is that of a difference to other weights
    if joined:
        context.ignore("EpisodeRequested.policy_version")  # another learner, which is not there, had a part in the pace
        report.notes["learners, one after another"] = 1 + len(joined)
    context.progress.expect(sum(len(lineage.published) for _, lineages in learners for lineage in lineages))
    for configuration, lineages in learners:
        await replay_lineages(context, configuration, lineages, episodes, make_trainer, folder=folder)


async def replay_lineages(
    context: ReplayContext,
    learner: Configuration,
    lineages: Sequence[Lineage],
    episodes: dict[str, RecordedEpisode],
    make_trainer: MakeTrainer | None,
    *,
    folder: Path,
) -> None:
    """Replay one policy's lineages in turn, up to the first that differs."""
    report, joined = context.report, find_joined_policy(learner)
    tasks, before, reason = RecordedTasks(episodes.values()), len(report.differences), ""
    if requests := sum(lineage.operator_requests for lineage in lineages):
        report.notes["evaluation episodes that an operator asked for, which no learner repeats"] += requests
    for lineage in lineages:
        configuration = configure_lineage(context, learner, lineage, folder, trains=make_trainer is not None)
        files = policy_folder(configuration.run)
        for place in (files.weights, files.checkpoints):
            await anyio.Path(place).mkdir(parents=True, exist_ok=True)
        state = ResumeState(context.recording, lineages, lineage, episodes, files.checkpoints, joined)
        reason = reason or state.missing
        if reason:
            note_left_out(report, lineage, reason)
            continue
        if len(lineages) > 1:
            report.notes["lineages that were replayed, each from where it began"] += 1
        async with open_replay_environment(context.recording, configuration) as environment:
            make_driver = JoinedLearnerDriver if joined else LearnerDriver
            driver = make_driver(context, environment, lineage, episodes, state.restore(environment))
            if make_trainer is not None:
                trainer = await anyio.to_thread.run_sync(make_trainer, configuration)
            else:
                trainer = driver.make_recorded_trainer()
            await driver.run(partial(_run_learner, driver, trainer, tasks))
        note_checks(report, driver, trainer)
        if len(report.differences) > before:
            reason = f"lineage {lineage.name} differs, and it stands on that"


async def _run_learner(driver: LearnerDriver, trainer: Trainer, tasks: RecordedTasks, bus: Bus, drain: anyio.Event) -> None:
    await run_learner(
        bus,
        configuration=driver.environment.configuration,
        name=WORKER,
        drain=drain,
        trainer=trainer,
        judge=find_recorded_group_judge(driver.lineage.steps),
        curriculum=cast(Curriculum, tasks),
        runtime=Runtime(offload=driver.offload),
    )


def configure_lineage(
    context: ReplayContext, learner: Configuration, lineage: Lineage, folder: Path, *, trains: bool
) -> Configuration:
    """The lineage's own settings; of a recording without them those of the run's last start. A lineage that ended may have been
    resumed with more steps than it was started with."""
    configuration, replace = learner, msgspec.structs.replace
    if lineage.settings:
        configuration = apply_settings(configuration, lineage.settings, context.recording)
        if not context.options.trusted:
            configuration = take_harmless_settings(configuration)
    steps = lineage.last_step if lineage.is_whole else configuration.learner.steps
    return replace(
        configuration,
        run=replace(configuration.run, folder=str(folder)),
        learner=replace(configuration.learner, steps=steps),
        # Nobody is there to be offered a version, and a recording opens no port.
        weights=replace(configuration.weights, transfer="files") if trains else WeightsSettings(),
    )


def note_left_out(report: Report, lineage: Lineage, reason: str) -> None:
    first, last = lineage.start + 1, lineage.last_step
    if first > last:
        report.skipped[f"messages of lineage {lineage.name}, which trained nothing: {reason}"] = len(lineage.published)
    else:
        span = f"{first} to {last}" if first < last else f"{last}"
        report.skipped[f"steps of lineage {lineage.name} ({span}): {reason}"] = last + 1 - first


def note_checks(report: Report, driver: LearnerDriver, trainer: Trainer) -> None:
    shown = "checked: requests, groups, advantages, batches, evaluations, lineage"
    if isinstance(trainer, RecordedTrainer):
        report.checked = f"{shown}; not checked: loss, gradients, weights (--until)"
        report.notes["training sequences that are the recorded ones, token by token"] += trainer.sequences
        report.notes["sampled tokens in them"] += trainer.tokens
    else:
        report.checked = f"{shown}, and what training makes of them"
        report.measured[TRAINING] = report.measured.get(TRAINING, 0.0) + driver.train_seconds


def check_images(recording: Recording, episodes: Iterable[RecordedEpisode]) -> None:
    """Raise `UserError` if images are missing that Actions show: a learner would leave out their episodes."""
    named = {name for episode in episodes for entry in episode.result_actions for name in find_referenced_objects(entry)}
    if missing := len(named - set(recording.objects)):
        raise UserError(f"{recording.path} lacks {missing} of {len(named)} images: record the run again, with its objects")
