"""Supervised fine-tuning on whole sequences with the torch trainer: a warm start before reinforcement learning. Blocking."""

import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from fleetbus.core.algorithms.arrays import Array
from fleetbus.core.algorithms.objectives import Clip
from fleetbus.errors import UserError
from fleetbus_workers.learner.base import TrainingSequence
from fleetbus_workers.learner.torch.settings import TorchTrainerSettings
from fleetbus_workers.learner.torch.trainer import TorchTrainer


def negative_log_likelihood(logprobs: Array, old_logprobs: Array, advantages: Array, mask: Array, clip: Clip) -> Array:
    """``-log pi`` per token: maximum likelihood, in the form of an objective."""
    return -logprobs


def fine_tune(
    model: Path,
    sequences: Sequence[TrainingSequence],
    output: Path,
    *,
    settings: TorchTrainerSettings,
    epochs: int,
    batch: int,
    seed: int,
    report: Callable[[int, int, float], None],
) -> None:
    """Train ``epochs`` passes over the sequences, shuffled, and write the model's folder, which is there whole or not at all.
    ``report`` gets step, steps and the mean loss of its tokens. Raises `UserError` if ``output`` is not empty."""
    check_output(output)
    trainer = TorchTrainer(model, settings=settings, objective=negative_log_likelihood)
    draw = np.random.default_rng(seed)
    steps = epochs * -(-len(sequences) // batch)
    step = 0
    for _ in range(epochs):
        order = draw.permutation(len(sequences))
        for start in range(0, len(order), batch):
            chosen = [sequences[index] for index in order[start : start + batch]]
            metrics = trainer.train(chosen, version=-2, progress=step / steps)
            step += 1
            report(step, steps, metrics["loss"])
    write_folder(trainer, output)


def check_output(folder: Path) -> None:
    """Raise `UserError` if a model cannot be written there."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder} is there already: name a folder that is new or empty")
    existing = next(path for path in folder.absolute().parents if path.exists())
    try:
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        raise UserError(f"cannot write below {existing} ({error.strerror}): name another folder") from error


def write_folder(trainer: TorchTrainer, folder: Path) -> None:
    """Write the trainer's model into a folder that is there whole or not at all."""
    partial = folder.with_name(f".{folder.name}.part")
    shutil.rmtree(partial, ignore_errors=True)
    trainer.save_model(partial)
    if folder.exists():
        folder.rmdir()
    partial.rename(folder)
