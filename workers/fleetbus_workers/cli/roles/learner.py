"""``fleetbus learner``: the learner with its trainer and its tasks."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import anyio
import anyio.to_thread
import click

from fleetbus_workers.assembly.work import Work
from fleetbus_workers.cli.options import SettingsCommand, settings_options
from fleetbus_workers.cli.roles.role import role_options, run_role

if TYPE_CHECKING:
    from fleetbus.bus.base import Bus
    from fleetbus.config.settings import Configuration
    from fleetbus_workers.learner.curriculum import Curriculum


def _load_work() -> Work:
    from fleetbus.config.run_folder import policy_folder
    from fleetbus.files import create_folder
    from fleetbus_workers.assembly.engines import check_packages
    from fleetbus_workers.assembly.learner_parts import build_curriculum, open_group_judge
    from fleetbus_workers.assembly.model import find_model_folder
    from fleetbus_workers.assembly.trainers import build_trainer_settings, choose_precision
    from fleetbus_workers.assembly.vision import check_vision
    from fleetbus_workers.learner.hooks import check_hooks
    from fleetbus_workers.learner.worker import run_learner

    async def work(bus: Bus, configuration: Configuration, name: str, drain: anyio.Event) -> None:
        curriculum = await anyio.to_thread.run_sync(build_curriculum, configuration)
        check_vision(configuration, curriculum.tasks if configuration.run.tasks else (), role="learner")
        await anyio.to_thread.run_sync(check_hooks, configuration.algorithm)
        if configuration.learner.trainer == "tinker":
            await _train_on_tinker(bus, configuration, name, drain, curriculum)
            return
        check_packages("torch")
        from fleetbus_workers.learner.torch.distributed import LeaderTrainer, run_follower
        from fleetbus_workers.learner.torch.trainer import TorchTrainer

        configuration = choose_precision(configuration)  # the log keeps what is computed
        folder, settings = find_model_folder(configuration.run), build_trainer_settings(configuration)
        trainer = await anyio.to_thread.run_sync(partial(TorchTrainer, folder, settings=settings))
        if trainer.shards.rank:  # torchrun started several, and the first one leads
            await anyio.to_thread.run_sync(run_follower, trainer)
            return
        leading = LeaderTrainer(trainer) if trainer.shards.world > 1 else None
        for files in (policy_folder(configuration.run).weights, policy_folder(configuration.run).checkpoints):
            create_folder(files)
        try:
            async with open_group_judge(configuration) as judge:
                await run_learner(
                    bus,
                    configuration=configuration,
                    name=name,
                    drain=drain,
                    trainer=leading or trainer,
                    curriculum=curriculum,
                    judge=judge,
                )
        finally:
            if leading is not None:
                with anyio.CancelScope(shield=True):
                    await anyio.to_thread.run_sync(leading.close)

    return work


async def _train_on_tinker(
    bus: Bus, configuration: Configuration, name: str, drain: anyio.Event, curriculum: Curriculum
) -> None:
    from fleetbus.config.run_folder import policy_folder
    from fleetbus.files import create_folder
    from fleetbus_workers.assembly.engines import check_packages
    from fleetbus_workers.assembly.learner_parts import open_group_judge
    from fleetbus_workers.assembly.model import find_model_folder
    from fleetbus_workers.learner.tinker import TinkerTrainer
    from fleetbus_workers.learner.worker import run_learner
    from fleetbus_workers.tinker_service import open_service_client

    check_packages("tinker")
    folder, settings = find_model_folder(configuration.run), configuration.tinker
    client = await anyio.to_thread.run_sync(open_service_client, settings)
    trainer = TinkerTrainer(
        client, folder, base_model=settings.base_model or str(folder), settings=settings, learner=configuration.learner
    )
    for files in (policy_folder(configuration.run).weights, policy_folder(configuration.run).checkpoints):
        create_folder(files)
    async with open_group_judge(configuration) as judge:
        await run_learner(
            bus, configuration=configuration, name=name, drain=drain, trainer=trainer, curriculum=curriculum, judge=judge
        )


@click.command("learner", cls=SettingsCommand)
@role_options
@settings_options(
    "run", "nats", "learner", "algorithm", "trainer", "tinker", "weights", "episode", "evaluation", "reward", "limits", "log"
)
def command(**values: Any) -> int:
    """Start the learner: it requests episodes, trains on them, publishes the policy and stores checkpoints.

    Install with `pip install 'fleetbus[torch]'`. It resumes from the run's last checkpoint. One per run: a second one takes
    over from the first. SIGTERM or Ctrl-C: store a checkpoint, then exit. A model too large for one process is sharded over
    several: `torchrun --nproc-per-node N -m -- fleetbus_workers.cli learner ...`.
    """
    from fleetbus.config.seats import check_learner

    return run_role("learner", _load_work, values, check=check_learner)
