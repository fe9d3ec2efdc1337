"""A trainer without a model: counts what it is given, writes small files. For simulations and tests of the learner."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fleetbus_schemas import TensorEntry
from fleetbus_workers.images.placed_image import PlacedImage
from fleetbus_workers.learner.base import TrainingSequence
from fleetbus_workers.learner.checkpoints import STATE, WEIGHTS


class ScriptedTrainer:
    """Its only weight is the number of updates, so a restored trainer can be distinguished from a fresh one."""

    vocabulary = 0

    def __init__(self) -> None:
        self.updates = 0
        self.trained: list[str] = []

    def check_images(self, episode_id: str, ids: NDArray[np.int32], images: Sequence[PlacedImage]) -> None:
        """Images are not looked at."""

    def train(self, batch: Sequence[TrainingSequence], *, version: int, progress: float) -> dict[str, float]:
        self.updates += 1
        self.trained += dict.fromkeys(sequence.episode_id for sequence in batch)
        tokens = int(np.sum([sequence.loss_mask.sum() for sequence in batch]))
        return {"loss": 0.0, "grad_norm": 0.0, "entropy": 1.0, "clip_fraction": 0.0, "ratio_max": 1.0} | {
            "logprob_difference_max": 0.0,
            "tokens": float(tokens),
        }

    def save_weights(self, file: Path) -> tuple[TensorEntry, ...]:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps({"updates": self.updates}))
        return (TensorEntry(name="updates", shape=(), dtype="I64", sha256=""),)

    def save_model(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.save_weights(folder / "weights.json")

    def save_state(self, file: Path) -> None:
        file.write_text(json.dumps({"trained": self.trained}))

    def start_checkpoint(self, folder: Path) -> None:
        self.save_weights(folder / WEIGHTS)
        self.save_state(folder / STATE)

    def restore(self, folder: Path) -> None:
        self.updates = json.loads((folder / WEIGHTS).read_text())["updates"]
        self.trained = json.loads((folder / STATE).read_text())["trained"]
