"""``fleetbus learn --from RECORDING``: a model fine-tuned on rewarded episodes of recordings, or on which of two was better."""

import math
import os
from collections import Counter
from pathlib import Path
from typing import Any

import click
import msgspec

from fleetbus.errors import UserError
from fleetbus_workers.assembly.engines import check_packages
from fleetbus_workers.assembly.model import find_model_folder
from fleetbus_workers.cli.options import SettingsCommand, load_settings, settings_options
from fleetbus_workers.command.exit_status import FINISHED
from fleetbus_workers.learner.torch.settings import TorchTrainerSettings
from fleetbus_workers.up.plan import load_shape

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
@click.option(
    "--method", type=click.Choice(["likelihood", "dpo"]), default="likelihood", show_default=True,
    help="likelihood: rewarded episodes; dpo: of each group better against worse episodes",
)  # fmt: skip
@click.option("--min-reward", type=float, default=1.0, show_default=True, metavar="X", help="Only rewards of X or more")
@click.option("--per-task", type=click.IntRange(0), default=0, show_default=True, help="Most episodes of one task; 0: all")
@click.option("--beta", type=click.FloatRange(0, min_open=True), default=0.1, show_default=True, help="Beta of dpo")
@click.option("--min-gap", type=click.FloatRange(0), default=0.0, show_default=True, help="Least difference in a pair of dpo")
@click.option("--epochs", type=click.IntRange(1), default=1, show_default=True, help="Passes over the episodes")
@click.option(
    "--batch", type=click.IntRange(1), default=32, show_default=True, help="Sequences per optimizer step; pairs with dpo"
)
@settings_options("run", "learner", "trainer")
def command(recordings: tuple[Path, ...], output: Path, method: str, **values: Any) -> int:
    """Fine-tune a model on episodes of recordings, on the tokens that were sampled: a warm start for `up --model`.

    By likelihood (rejection sampling) every sampled token of training episodes with enough reward is learned. By dpo, direct
    preference optimization, each group's better episodes are preferred to its worse ones, more than the model does that is
    trained. Nothing that a recording names is imported or run; its token ids have to be of the model's tokenizer.
    """
    options = {name: values.pop(name) for name in ("min_reward", "per_task", "beta", "min_gap", "epochs", "batch")}
    _check_options(method)
    loaded = load_settings(values, earlier=False)
    configuration = loaded.configuration
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UserError("fleetbus learn trains in one process: start it without torchrun")
    check_packages("torch")
    folder = find_model_folder(configuration.run)
    learner = configuration.learner
    if configuration.run.model and "learner.learning_rate" not in loaded.given:
        learner = msgspec.structs.replace(learner, learning_rate=RATE)
    settings = TorchTrainerSettings(learner=learner, trainer=configuration.trainer)
    learn = _learn_by_preference if method == "dpo" else _learn_by_likelihood
    learn(recordings, folder, output, options, settings, load_shape(folder).vocabulary, configuration.run.seed)
    click.echo(f"wrote {output}; train it on with: fleetbus up --model {output}")
    return FINISHED


def _check_options(method: str) -> None:
    """Refuse an option of the other method, and numbers that nothing can be compared with."""
    context = click.get_current_context()
    for name in ("min_reward", "beta", "min_gap"):
        if not math.isfinite(context.params[name]):
            raise UserError(f"--{name.replace('_', '-')} must be a number, not {context.params[name]:g}")
    for name in ("min_reward", "per_task") if method == "dpo" else ("beta", "min_gap"):
        if context.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE:
            raise UserError(f"--{name.replace('_', '-')} does not go with --method {method}")


def _learn_by_likelihood(
    recordings: tuple[Path, ...], folder: Path, output: Path, options: dict[str, Any], settings: Any, vocabulary: int, seed: int
) -> None:
    from fleetbus_workers.learner.fine_tuning import fine_tune
    from fleetbus_workers.learner.rejection_sampling import select_rewarded

    least = options["min_reward"]
    found = select_rewarded(recordings, min_reward=least, per_task=options["per_task"], vocabulary=vocabulary)
    _print_left_out(found.torn, found.left_out)
    if not found.sequences:
        raise UserError(f"no training episode has a reward of {least:g} or more and tokens that can be trained")
    click.echo(f"{found.episodes} episodes, {len(found.sequences)} sequences, learning rate {settings.learner.learning_rate:g}")
    fine_tune(
        folder, found.sequences, output, settings=settings, epochs=options["epochs"], batch=options["batch"], seed=seed,
        report=lambda step, steps, loss: click.echo(f"step {step} of {steps}: loss {loss:.4f}"),
    )  # fmt: skip


def _learn_by_preference(
    recordings: tuple[Path, ...], folder: Path, output: Path, options: dict[str, Any], settings: Any, vocabulary: int, seed: int
) -> None:
    from fleetbus_workers.learner.preference_pairs import count_pairs, select_pairs
    from fleetbus_workers.learner.preferences import prefer

    found = select_pairs(recordings, min_gap=options["min_gap"], vocabulary=vocabulary)
    _print_left_out(found.torn, found.left_out)
    if not found.pairs:
        raise UserError("no group has two training episodes of different rewards and tokens that can be trained")
    click.echo(f"{count_pairs(found.pairs)}, learning rate {settings.learner.learning_rate:g}, beta {options['beta']:g}")
    prefer(
        folder, found.pairs, output, settings=settings, beta=options["beta"], epochs=options["epochs"], batch=options["batch"],
        seed=seed,
        report=lambda step, steps, loss, right: click.echo(
            f"step {step} of {steps}: loss {loss:.4f}, better preferred {right:.2f}"
        ),
    )  # fmt: skip


def _print_left_out(torn: list[str], left_out: Counter[str]) -> None:
    for line in (*torn, *(f"left out: {count} episodes: {reason}" for reason, count in left_out.items() if count)):
        click.echo(line)
