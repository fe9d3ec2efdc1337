"""``fleetbus learn --from RECORDING``: a model fine-tuned on the rewarded episodes of recordings."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click
import msgspec

from fleetbus_workers.cli.options import SettingsCommand, load_settings, settings_options

RATE = 1e-5
"""Learning rate of a pretrained model's fine-tuning, unless one is given."""


@click.command("learn", cls=SettingsCommand)
@click.option(
    "--from", "recordings", type=click.Path(path_type=Path), multiple=True, required=True, metavar="FILE",
    help="A recording (`fleetbus record`); may be given several times",
)  # fmt: skip
@click.option(
    "--output", type=click.Path(path_type=Path), required=True, metavar="DIR", help="Folder of the model that is made"
)
@click.option("--min-reward", type=float, default=1.0, show_default=True, metavar="X", help="Only rewards of X or more")
@click.option("--per-task", type=click.IntRange(0), default=0, show_default=True, help="Most episodes of one task; 0: all")
@click.option("--epochs", type=click.IntRange(1), default=1, show_default=True, help="Passes over the episodes")
@click.option("--batch", type=click.IntRange(1), default=32, show_default=True, help="Sequences per optimizer step")
@settings_options("run", "learner", "trainer")
def command(
    recordings: tuple[Path, ...], output: Path, min_reward: float, per_task: int, epochs: int, batch: int, **values: Any
) -> int:
    """Fine-tune a model on rewarded episodes of recordings, on the tokens that were sampled: a warm start for `up --model`.

    Rejection sampling: of training episodes with enough reward every sampled token is learned by maximum likelihood. Nothing
    that a recording names is imported or run; its token ids have to be of the model's tokenizer.
    """
    from fleetbus.errors import UserError
    from fleetbus_workers.assembly.engines import check_packages
    from fleetbus_workers.assembly.model import find_model_folder
    from fleetbus_workers.exit_status import FINISHED
    from fleetbus_workers.up.plan import load_shape

    loaded = load_settings(values, earlier=False)
    configuration = loaded.configuration
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UserError("fleetbus learn trains in one process: start it without torchrun")
    check_packages("torch")
    from fleetbus_workers.learner.fine_tuning import fine_tune
    from fleetbus_workers.learner.rejection_sampling import select_rewarded
    from fleetbus_workers.learner.torch.settings import TorchTrainerSettings

    folder = find_model_folder(configuration.run)
    found = select_rewarded(recordings, min_reward=min_reward, per_task=per_task, vocabulary=load_shape(folder).vocabulary)
    for line in (*found.torn, *(f"left out: {count} episodes: {reason}" for reason, count in found.left_out.items())):
        click.echo(line)
    if not found.sequences:
        raise UserError(f"no training episode has a reward of {min_reward:g} or more and tokens that can be trained")
    learner = configuration.learner
    if configuration.run.model and "learner.learning_rate" not in loaded.given:
        learner = msgspec.structs.replace(learner, learning_rate=RATE)
    click.echo(f"{found.episodes} episodes, {len(found.sequences)} sequences, learning rate {learner.learning_rate:g}")
    fine_tune(
        folder,
        found.sequences,
        output,
        settings=TorchTrainerSettings(learner=learner, trainer=configuration.trainer),
        epochs=epochs,
        batch=batch,
        seed=configuration.run.seed,
        report=lambda step, steps, loss: click.echo(f"step {step} of {steps}: loss {loss:.4f}"),
    )
    click.echo(f"wrote {output}; train it on with: fleetbus up --model {output}")
    return FINISHED
