"""The worker under test as its own command would build it: environments, engine and trainer from the recorded configuration.

Heavy libraries are imported by the role that needs them, when it is replayed.
"""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import anyio.to_thread
import msgspec

from fleetbus.config.settings import Configuration
from fleetbus.errors import UserError
from fleetbus.recording import Recording
from fleetbus.recording.export import restore_files
from fleetbus_workers.replay.compare import LOGPROB_TOLERANCE
from fleetbus_workers.replay.configured import configuration_of
from fleetbus_workers.replay.progress import Progress
from fleetbus_workers.replay.quiet import quiet
from fleetbus_workers.replay.report import FORWARD, SCORING, Report
from fleetbus_workers.replay.stage import PATIENCE_SECONDS

if TYPE_CHECKING:
    from fleetbus_workers.environment.base import Environment
    from fleetbus_workers.inference.base import Sampler
    from fleetbus_workers.learner.torch.trainer import TorchTrainer
    from fleetbus_workers.replay.scoring import ScoringSampler

Role = Literal["environment", "inference", "learner"]


class Replay(msgspec.Struct, frozen=True, kw_only=True):
    """What is replayed how. ``environment`` is a spec as in ``--environment`` or makes an environment per episode; ``model``
    a model folder (both default to the recorded ones); ``weights`` a folder with the published files; ``speed`` a multiple of
    the recorded speed, None as fast as it goes; ``ignored`` are ``Type.field`` names that may differ, too. ``jobs`` processes
    share the work; None: one per CPU where that is faster. ``sample_again``: tokens are sampled one by one even where a forward
    pass could show that the recorded ones would be. ``until`` ``batches``: the learner's batches are compared, not trained.
    ``distinct``: of episodes with the same task, actions and outcome the environment plays one."""

    role: Role = "environment"
    environment: str | Callable[[], Environment] | None = None
    model: Path | None = None
    weights: Path | None = None
    speed: float | None = None
    ignored: frozenset[str] = frozenset()
    tolerance: float = LOGPROB_TOLERANCE
    patience_seconds: float = PATIENCE_SECONDS
    jobs: int | None = None
    sample_again: bool = False
    until: Literal["batches", "weights"] = "weights"
    distinct: bool = False


async def replay_here(recording: Recording, replay: Replay, progress: Progress | None = None) -> Report:
    """Replay a recording in this process, counting on ``progress``; raises `UserError` when it cannot be replayed."""
    if not recording.entries:
        raise UserError(f"{recording.path} has no entries: there is nothing to replay")
    configuration = configuration_of(recording)
    play = {"environment": _environment, "inference": _inference, "learner": _learner}[replay.role]
    with quiet():
        report = await play(recording, configuration, replay, progress)
    report.torn = recording.torn
    return report


async def _environment(recording: Recording, configuration: Configuration, replay: Replay, progress: Progress | None) -> Report:
    from fleetbus_workers.replay.environment import replay_environment

    async with _environments(configuration, replay.environment) as make:
        return await replay_environment(
            recording,
            make,
            configuration=configuration,
            speed=replay.speed,
            ignored=replay.ignored,
            patience_seconds=replay.patience_seconds,
            distinct=replay.distinct,
            progress=progress,
        )


@asynccontextmanager
async def _environments(
    configuration: Configuration, wanted: str | Callable[[], Environment] | None
) -> AsyncIterator[Callable[[], Environment]]:
    if callable(wanted):
        yield wanted
        return
    from fleetbus_workers.environment.images.store import build_image_store
    from fleetbus_workers.environment.isolation.verifier import VerifierLimits
    from fleetbus_workers.environment.keyed_specs import build_keyed_factory
    from fleetbus_workers.environment.specs import build_environment_factory
    from fleetbus_workers.replay.stage_bus import StageObjects
    from fleetbus_workers.replay.verifying import RepeatingVerifier

    verifier = RepeatingVerifier(VerifierLimits(seconds=configuration.limits.verify))
    style = configuration.environment.prompt
    make_factory = partial(
        build_environment_factory,
        verifier=verifier,
        observation_bytes=configuration.environment.observation_bytes,
        prompt=None if style == "auto" else style,
        configuration=configuration,
        store_image=build_image_store(StageObjects({})) if configuration.environment.images else None,
    )
    factory = build_keyed_factory(wanted or configuration.run.environment, make_factory)
    async with verifier.running(), factory.running():
        yield factory


async def _inference(recording: Recording, configuration: Configuration, replay: Replay, progress: Progress | None) -> Report:
    from fleetbus_workers.assembly.engines import build_image_source, launch_engine
    from fleetbus_workers.replay.inference import replay_inference
    from fleetbus_workers.replay.stage import WORKER

    run = msgspec.structs.replace(configuration.run, model=str(_model(configuration, replay)))
    configuration = msgspec.structs.replace(configuration, run=run)
    with tempfile.TemporaryDirectory(prefix="fleetbus-replay-") as place:
        weights = restore_files(recording.files, Path(place))
        if replay.weights is not None:
            weights |= {file.name: file for file in replay.weights.iterdir() if file.is_file()}
        async with launch_engine(configuration, WORKER) as (sampler, template):
            scoring = None
            if configuration.inference.engine == "torch" and replay.speed is None and not replay.sample_again:
                scoring = await anyio.to_thread.run_sync(partial(_scoring, configuration, sampler))
            report = await replay_inference(
                recording,
                scoring or sampler,
                template,
                configuration=configuration,
                weights=weights,
                speed=replay.speed,
                ignored=replay.ignored,
                tolerance=replay.tolerance,
                patience_seconds=replay.patience_seconds,
                scorer=scoring,
                images=lambda bus: build_image_source(template, bus, recording.run),
                progress=progress,
            )
    _tell_of_tokens(report, scoring)
    return report


def _scoring(configuration: Configuration, sampler: Sampler) -> ScoringSampler | None:
    """None for a model that is scored by other means than its text."""
    from fleetbus_workers.assembly.model import find_model_folder
    from fleetbus_workers.replay.scoring import scoring_sampler

    settings = configuration.inference
    folder = find_model_folder(configuration.run)
    return scoring_sampler(sampler, folder, max_model_len=settings.max_model_len, threads=settings.threads)


def _tell_of_tokens(report: Report, scoring: ScoringSampler | None) -> None:
    if scoring is None:
        report.checked = "every token was sampled again"
        return
    report.checked = "tokens are those that the sampler chooses from a forward pass over them, or sampled again"
    report.notes["turns that a forward pass showed to be sampled so"] += scoring.proved
    report.notes["turns sampled again"] += scoring.sampled
    report.notes["tokens through the model at once"] += scoring.tokens
    report.measured = {FORWARD: scoring.forward_seconds, SCORING: scoring.seconds}


async def _learner(recording: Recording, configuration: Configuration, replay: Replay, progress: Progress | None) -> Report:
    from fleetbus_workers.replay.learner import replay_learner

    make_trainer = None if replay.until == "batches" else partial(_trainer, configuration, replay)
    with tempfile.TemporaryDirectory(prefix="fleetbus-replay-") as place:
        return await replay_learner(
            recording,
            make_trainer,
            configuration=configuration,
            folder=Path(place),
            speed=replay.speed,
            ignored=replay.ignored,
            patience_seconds=replay.patience_seconds,
            progress=progress,
        )


def _trainer(configuration: Configuration, replay: Replay) -> TorchTrainer:
    from fleetbus_workers.assembly.trainers import build_trainer_settings
    from fleetbus_workers.learner.torch.trainer import TorchTrainer

    return TorchTrainer(_model(configuration, replay), settings=build_trainer_settings(configuration))


def _model(configuration: Configuration, replay: Replay) -> Path:
    from transformers.utils.logging import disable_progress_bar

    from fleetbus_workers.assembly.model import find_model_folder

    disable_progress_bar()
    folder = replay.model or find_model_folder(configuration.run)
    if not folder.is_dir():
        raise UserError(f"the model folder {folder} is not there: give another with --model")
    return folder
