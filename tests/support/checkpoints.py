"""A checkpoint of a trainer alone, without the learner around it."""

from pathlib import Path

from fleetbus_workers.learner.base import Trainer


def store(trainer: Trainer, folder: Path) -> Path:
    """All that the trainer's `restore` needs, written when this returns."""
    folder.mkdir()
    finish = trainer.start_checkpoint(folder)
    if finish is not None:
        finish()
    return folder
