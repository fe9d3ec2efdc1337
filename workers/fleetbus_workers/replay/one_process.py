"""Replays a recording in this process, up to its report: the worker under test is built as its own command would build it.

Heavy libraries are imported by the role that needs them, when it is replayed.
"""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import anyio.to_thread
import msgspec

from fleetbus.bus.memory_objects import MemoryObjectStore
from fleetbus.config.seats import SeatSetting, configure_seat
from fleetbus.config.settings import Configuration
from fleetbus.errors import UserError
from fleetbus.logs.setup import suppress_logs
from fleetbus.recording import Recording
from fleetbus.recording.export import restore_files
from fleetbus_workers.assembly.engines import build_image_source, launch_engine
from fleetbus_workers.assembly.environments import open_environments
from fleetbus_workers.assembly.model import find_model_folder
from fleetbus_workers.assembly.trainers import build_trainer_settings
from fleetbus_workers.environment.images.store import build_image_store
from fleetbus_workers.replay.driver import ReplayContext
from fleetbus_workers.replay.options import Replay, read_configuration
from fleetbus_workers.replay.progress import Progress
from fleetbus_workers.replay.recorded_choices import (
    choose_model,
    find_run_weights,
    find_trained_seat,
    list_files,
    restrict_recorded_choices,
)
from fleetbus_workers.replay.replay_environment import WORKER
from fleetbus_workers.replay.report import Report

if TYPE_CHECKING:
    from fleetbus_workers.learner.base import Trainer


async def replay_here(recording: Recording, replay: Replay, progress: Progress) -> Report:
    """Replay a recording in this process; raises `UserError` when it cannot be replayed."""
    if not recording.entries:
        raise UserError(f"{recording.path} contains no entries to replay")
    configuration = read_configuration(recording)
    if not replay.trusted:
        configuration = restrict_recorded_choices(configuration, recording, role=replay.role, environment=replay.environment)
    context = ReplayContext(recording, replay, configuration=configuration, progress=progress)
    roles = {"environment": _replay_environment, "inference": _replay_inference, "learner": _replay_learner}
    with suppress_logs(), tempfile.TemporaryDirectory(prefix="fleetbus-replay-") as place:
        await roles[replay.role](context, Path(place))
    return context.report


async def _replay_environment(context: ReplayContext, folder: Path) -> None:
    from fleetbus_workers.replay.environment_driver import replay_environment
    from fleetbus_workers.replay.recorded_judge import find_recorded_judge

    wanted = context.options.environment
    if callable(wanted):
        await replay_environment(context, wanted)
        return
    async with open_environments(
        context.configuration,
        specs=wanted or "",
        store_image=build_image_store(MemoryObjectStore({})),
        sandbox="auto" if context.options.trusted else "required",
        reuse_verifiers=True,
        recorded_judge=find_recorded_judge(context),
    ) as make:
        await replay_environment(context, make)


async def _replay_inference(context: ReplayContext, folder: Path) -> None:
    from fleetbus_workers.replay.inference_driver import replay_inference

    options, configuration = context.options, context.configuration
    seat = find_trained_seat(configuration.run, options.policy)
    policy = seat.policy if seat is not None else ""
    model = find_model(context, seat)
    configuration = configure_seat(configuration, seat) if seat is not None else configuration
    configuration = msgspec.structs.replace(configuration, run=msgspec.structs.replace(configuration.run, model=str(model)))
    context.configuration = configuration
    weights = find_run_weights(context.recording, policy) | restore_files(context.recording.files, folder, policy)
    if options.weights is not None:
        weights |= list_files(options.weights)
    async with launch_engine(configuration, WORKER) as (sampler, template):
        scoring = None
        if configuration.inference.engine == "torch" and options.speed is None and not options.sample_again:
            from fleetbus_workers.replay.scoring import make_scoring_sampler

            scoring = await anyio.to_thread.run_sync(make_scoring_sampler, sampler, model, configuration.inference)
        images = partial(build_image_source, template, run=context.recording.run)
        await replay_inference(context, scoring or sampler, template, weights=weights, images=images)
    context.report.checked = "every token was sampled again"
    if scoring is not None:
        scoring.describe(context.report)


async def _replay_learner(context: ReplayContext, folder: Path) -> None:
    from fleetbus_workers.replay.learner_replay import replay_learner

    make_trainer = None if context.options.until == "batches" else partial(_make_trainer, context)
    await replay_learner(context, make_trainer, folder=folder)


def _make_trainer(context: ReplayContext, configuration: Configuration) -> Trainer:
    from fleetbus_workers.learner.torch.trainer import TorchTrainer

    seat = find_trained_seat(context.configuration.run, configuration.run.policy)
    return TorchTrainer(find_model(context, seat), settings=build_trainer_settings(configuration))


def find_model(context: ReplayContext, seat: SeatSetting | None = None) -> Path:
    """The model folder, of the policy of a trained ``seat`` or of the run's own: the one that was given, unless several
    policies are replayed and the seat has its own. Raises `UserError` if it is not there, or if only a recording that is not
    trusted names one."""
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    configuration = read_configuration(context.recording)
    recorded = (configure_seat(configuration, seat) if seat is not None else configuration).run
    options = context.options
    given = None if seat is not None and seat.model and not options.policy else options.model
    named = choose_model(recorded.model, given, context.recording, trusted=options.trusted)
    folder = find_model_folder(msgspec.structs.replace(recorded, model=named))
    if not folder.is_dir():
        raise UserError(f"model folder {folder} not found: give another with --model")
    return folder
