"""``fleetbus learner``: the learner with its trainer and its tasks."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import anyio
import anyio.to_thread
import click

from workers.cli.options import SettingsCommand, settings_options
from workers.cli.role import Work, role_options, run_role

if TYPE_CHECKING:
    from fleetbus.bus.base import Bus
    from fleetbus.config.settings import Configuration, LearnerSettings
    from workers.learner.curriculum import Curriculum
    from workers.learner.torch.settings import TorchTrainerSettings

WAREHOUSE_TASKS = 4096
"""Training tasks of the default environment: more than a run of the default length plays."""


def _load_work() -> Work:
    from fleetbus.config.run_folder import run_folder
    from workers.cli.model import model_folder
    from workers.learner.torch.trainer import TorchTrainer
    from workers.learner.worker import run_learner

    async def work(bus: Bus, configuration: Configuration, name: str, drain: anyio.Event) -> None:
        folder, settings = model_folder(configuration.run), _trainer_settings(configuration.learner)
        trainer = await anyio.to_thread.run_sync(partial(TorchTrainer, folder, settings=settings))
        curriculum = _curriculum(configuration)
        for files in (run_folder(configuration.run).weights, run_folder(configuration.run).checkpoints):
            files.mkdir(parents=True, exist_ok=True)
        await run_learner(bus, configuration=configuration, name=name, drain=drain, trainer=trainer, curriculum=curriculum)

    return work


def _trainer_settings(settings: LearnerSettings) -> TorchTrainerSettings:
    from workers.learner.torch.settings import TorchTrainerSettings

    return TorchTrainerSettings(
        learning_rate=settings.learning_rate,
        decayed_to=settings.learning_rate_final,
        dual_clip=settings.dual_clip or None,
        warmup_updates=settings.warmup_steps,
        gradient_norm=settings.gradient_clip,
        clip_low=settings.clip_low,
        clip_high=settings.clip_high,
        minibatches=settings.minibatches,
        micro_batch_size=settings.micro_batch,
        threads=settings.threads,
    )


def _curriculum(configuration: Configuration) -> Curriculum:
    """The tasks of the file that was named, or those of the warehouse."""
    from workers.environment.warehouse.tasks import held_out_tasks, train_tasks
    from workers.learner.curriculum import Curriculum, curriculum_from_file

    run = configuration.run
    if run.tasks:
        return curriculum_from_file(run.tasks, seed=run.seed)
    held_out = held_out_tasks(configuration.evaluation.episodes)
    return Curriculum(train_tasks(WAREHOUSE_TASKS, seed=run.seed), held_out, seed=run.seed)


@click.command("learner", cls=SettingsCommand)
@role_options
@settings_options("run", "nats", "learner", "algorithm", "trainer", "weights", "episode", "evaluation", "limits", "log")
def command(**values: Any) -> int:
    """The learner: requests episodes, trains on what comes back, publishes the policy, stores checkpoints.

    Install with `pip install 'fleetbus[torch]'`. It goes on from the run's last checkpoint. One per run: a second one takes
    over from the first. SIGTERM or Ctrl-C: store a checkpoint, then exit.
    """
    return run_role("learner", _load_work, values)
