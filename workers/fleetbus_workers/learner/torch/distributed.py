"""Several processes as one trainer: the leader's calls are made by every process, in the same order.

Rank 0 runs the learner and calls `LeaderTrainer`; the other processes that ``torchrun`` started run `follow` and nothing else.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleetbus_schemas import TensorEntry
from fleetbus_workers.images.placed_image import PlacedImage
from fleetbus_workers.learner.base import FinishWriting, SequenceTokens, TrainingSequence
from fleetbus_workers.learner.torch.trainer import TorchTrainer
from fleetbus_workers.weights.file import WritingWatcher


class LeaderTrainer:
    """`fleetbus_workers.learner.base.Trainer` over all processes. `close` ends the followers.

    An `OSError` of a call that writes leaves all processes where they were, and the call may be made again. All else that is
    raised may have left the others in the middle of the call: `close` then does not wait for them, and they end when this
    process does."""

    def __init__(self, trainer: TorchTrainer) -> None:
        self._trainer = trainer
        self._in_step = True

    @property
    def vocabulary(self) -> int:
        return self._trainer.vocabulary

    @property
    def differences(self) -> Mapping[str, float]:
        return self._trainer.differences

    @property
    def traced_tokens(self) -> Sequence[SequenceTokens]:
        return self._trainer.traced_tokens

    @property
    def watcher(self) -> WritingWatcher | None:
        return self._trainer.watcher

    @watcher.setter
    def watcher(self, watcher: WritingWatcher | None) -> None:
        """The leader alone writes, so that the others need not know."""
        self._trainer.watcher = watcher

    def check_images(self, episode_id: str, ids: NDArray[np.int32], images: Sequence[PlacedImage]) -> None:
        self._trainer.check_images(episode_id, ids, images)

    def train(self, batch: Sequence[TrainingSequence], *, version: int, progress: float) -> dict[str, float]:
        metrics: dict[str, float] = self._call("train", list(batch), version=version, progress=progress)
        return metrics

    def save_weights(self, file: Path) -> tuple[TensorEntry, ...]:
        manifest: tuple[TensorEntry, ...] = self._call("save_weights", file, writes=True)
        return manifest

    def save_model(self, folder: Path) -> None:
        self._call("save_model", folder, writes=True)

    def start_checkpoint(self, folder: Path) -> FinishWriting:
        finish: FinishWriting = self._call("start_checkpoint", folder, writes=True)
        return finish

    def restore(self, folder: Path) -> None:
        self._call("restore", folder)

    def close(self) -> None:
        if self._in_step:
            self._trainer.shards.broadcast(None)
            self._trainer.close()

    def _call(self, name: str, *arguments: object, writes: bool = False, **named: object) -> Any:
        self._in_step = False
        self._trainer.shards.broadcast((name, arguments, named))
        try:
            result = getattr(self._trainer, name)(*arguments, **named)
        except OSError:
            self._in_step = writes
            raise
        self._in_step = True
        return result


def run_follower(trainer: TorchTrainer) -> None:
    """Repeat the leader's calls until it closes. Raises what a call raises, and `RuntimeError` when the leader is gone."""
    while (call := trainer.shards.broadcast()) is not None:
        name, arguments, named = call
        getattr(trainer, name)(*arguments, **named)
    trainer.close()
