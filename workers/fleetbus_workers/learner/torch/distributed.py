"""Several processes as one trainer: the leader's calls are made by every process, in the same order.

Rank 0 runs the learner and calls `LeaderTrainer`; the other processes that ``torchrun`` started run `follow` and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fleetbus_schemas import TensorEntry
from fleetbus_workers.learner.base import FinishWriting, TrainingSequence
from fleetbus_workers.learner.torch.trainer import TorchTrainer


class LeaderTrainer:
    """`fleetbus_workers.learner.base.Trainer` over all processes. `close` ends the followers."""

    def __init__(self, trainer: TorchTrainer) -> None:
        self._trainer = trainer

    def train(self, batch: Sequence[TrainingSequence], *, version: int, progress: float) -> dict[str, float]:
        self._broadcast_call("train", list(batch), version=version, progress=progress)
        return self._trainer.train(batch, version=version, progress=progress)

    def save_weights(self, file: Path) -> tuple[TensorEntry, ...]:
        self._broadcast_call("save_weights", file)
        return self._trainer.save_weights(file)

    def save_model(self, folder: Path) -> None:
        self._broadcast_call("save_model", folder)
        self._trainer.save_model(folder)

    def start_checkpoint(self, folder: Path) -> FinishWriting:
        self._broadcast_call("start_checkpoint", folder)
        return self._trainer.start_checkpoint(folder)

    def restore(self, folder: Path) -> None:
        self._broadcast_call("restore", folder)
        self._trainer.restore(folder)

    def close(self) -> None:
        self._trainer.shards.broadcast(None)
        self._trainer.close()

    def _broadcast_call(self, name: str, *arguments: object, **named: object) -> None:
        self._trainer.shards.broadcast((name, arguments, named))


def run_follower(trainer: TorchTrainer) -> None:
    """Repeat the leader's calls until it closes. Raises what a call raises, and `RuntimeError` when the leader is gone."""
    while (call := trainer.shards.broadcast()) is not None:
        name, arguments, named = call
        getattr(trainer, name)(*arguments, **named)
    trainer.close()
