"""`TinkerTrainer`: training on a Tinker service by its official SDK. The weights never leave the service: a version of the
policy, and what a checkpoint holds, are small files that name paths there.

Groups and advantages were made before (by group id, never by position); nothing is tokenised here; a sequence without an
advantage is not sent; optimizer and weights are in every checkpoint; every call has a time limit and its error ends the
learner, which resumes from the last checkpoint.
"""

import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from uuid import uuid4

import msgspec
import numpy as np
from numpy.typing import NDArray

from fleetbus.config.settings import LearnerSettings, TinkerSettings
from fleetbus.errors import UserError
from fleetbus_schemas import TensorEntry
from fleetbus_schemas.message import UNREADABLE
from fleetbus_workers.images.placed_image import PlacedImage
from fleetbus_workers.learner.base import TrainingSequence
from fleetbus_workers.learner.checkpoints import STATE, WEIGHTS
from fleetbus_workers.learner.minibatches import split_minibatches
from fleetbus_workers.learner.tinker_batches import TinkerMetrics, build_datum_arrays
from fleetbus_workers.tinker_service import SamplerPath, format_error
from fleetbus_workers.weights.names import copy_companions

CALL_SECONDS = 1800.0
"""For one call of the service: a batch of a large model waits its turn there."""


class StatePath(msgspec.Struct, frozen=True, kw_only=True, tag="tinker"):
    """A checkpoint's state: the path of weights and optimizer on the service, and how many updates they have seen."""

    state: str
    updates: int


class TinkerTrainer:
    """`Trainer` on the service of ``client``, for LoRA adapters on ``base_model``; ``folder`` has the tokenizer."""

    vocabulary = 0

    def __init__(
        self, client: Any, folder: Path, *, base_model: str, settings: TinkerSettings, learner: LearnerSettings
    ) -> None:
        self._client = client
        self._folder = folder
        self._base_model = base_model
        self._settings = settings
        self._learner = learner
        self._training_client: Any = None
        self._updates = 0
        self._saved: tuple[int, str] | None = None

    def check_images(self, episode_id: str, ids: NDArray[np.int32], images: Sequence[PlacedImage]) -> None:
        """Images are not looked at."""

    def train(self, batch: Sequence[TrainingSequence], *, version: int, progress: float) -> dict[str, float]:
        """See `Trainer.train`; entropy is NaN, because the service does not report it. Further metrics: ``ratio_mean``, ``kl``
        (k3, to the sampler), ``learning_rate``, ``sequences_sent`` and ``seconds``."""
        started = time.perf_counter()
        if any(sequence.temperature != 1.0 for sequence in batch):
            raise UserError("a Tinker service trains at temperature 1: set episode.temperature = 1")
        measured = TinkerMetrics(self._learner.clip_ratio_low, self._learner.clip_ratio_high)
        norms: list[float] = []
        rate = self._compute_learning_rate(progress)
        learning = [sequence for sequence in batch if sequence.advantages.any()]
        for chosen in split_minibatches(len(learning), self._learner.minibatches):
            norms.append(self._update(learning[chosen], rate, measured, None if norms else version))
        metrics = measured.metrics() | {
            "tokens": float(sum(int(sequence.loss_mask.sum()) for sequence in batch)),
            "grad_norm": float(np.mean(norms)) if norms else math.nan,
            "learning_rate": rate,
            "sequences_sent": float(len(learning)),
            "seconds": time.perf_counter() - started,
        }
        return metrics

    def save_weights(self, file: Path) -> tuple[TensorEntry, ...]:
        """See `Trainer.save_weights`: a file that names the path; there are no tensors to list."""
        if self._saved is None or self._saved[0] != self._updates:
            name = f"v{self._updates:06d}-{uuid4().hex[:8]}"
            self._saved = self._updates, self._model.save_weights_for_sampler(name=name).result(timeout=CALL_SECONDS).path
        _write_atomically(file, SamplerPath(sampler=self._saved[1]))
        return ()

    def save_model(self, folder: Path) -> None:
        """See `Trainer.save_model`: tokenizer and configuration of the base model, and the path of the trained
        adapter on the service, in ``tinker.json``; the weights themselves stay there."""
        folder.mkdir(parents=True, exist_ok=True)
        copy_companions(self._folder, folder)
        self.save_weights(folder / "tinker.json")

    def start_checkpoint(self, folder: Path) -> None:
        """See `Trainer.start_checkpoint`: weights and optimizer are stored on the service, their paths here."""
        self.save_weights(folder / WEIGHTS)
        name = f"s{self._updates:06d}-{uuid4().hex[:8]}"
        path = self._model.save_state(name=name).result(timeout=CALL_SECONDS).path
        _write_atomically(folder / STATE, StatePath(state=path, updates=self._updates))

    def restore(self, folder: Path) -> None:
        """See `Trainer.restore`. Raises `OSError`, or `UserError` if a file is not of such a trainer or its path is gone."""
        import tinker

        state = folder / STATE
        try:
            stored = msgspec.json.decode(state.read_bytes(), type=StatePath)
        except UNREADABLE as error:
            raise UserError(f"{state} is not a checkpoint of a Tinker service: {error}") from error
        try:
            self._model.load_state_with_optimizer(stored.state).result(timeout=CALL_SECONDS)
        except (tinker.NotFoundError, tinker.BadRequestError, tinker.RequestFailedError) as error:
            raise UserError(f"the Tinker service has no state {stored.state}: {error}") from error
        self._updates, self._saved = stored.updates, None

    @property
    def _model(self) -> Any:
        """The training client, made at its first use: a model on the service costs memory there."""
        import tinker

        if self._training_client is None:
            base_model, rank = self._base_model, self._settings.rank
            try:
                self._training_client = self._client.create_lora_training_client(base_model=base_model, rank=rank)
            except (tinker.TinkerError, ValueError) as error:
                raise UserError(
                    f"the Tinker service cannot create an adapter of rank {rank} on {base_model}: {format_error(error)}"
                ) from error
        return self._training_client

    def _compute_learning_rate(self, progress: float) -> float:
        learner = self._learner
        decayed = 1.0 - (1.0 - learner.min_lr_ratio) * min(max(progress, 0.0), 1.0)
        return learner.learning_rate * decayed * min(1.0, (self._updates + 1) / max(learner.warmup_steps, 1))

    def _update(self, part: Sequence[TrainingSequence], rate: float, measured: TinkerMetrics, fresh: int | None) -> float:
        """One forward-backward and one optimizer step, submitted together; returns the gradient's norm, NaN if not reported."""
        import tinker

        tokens = sum(int(sequence.loss_mask.sum()) for sequence in part)
        data = [
            tinker.Datum(model_input=tinker.ModelInput.from_ints(arrays.inputs), loss_fn_inputs=arrays.loss_inputs)
            for arrays in (build_datum_arrays(sequence, tokens) for sequence in part)
        ]
        clips = {
            "clip_low_threshold": 1 - self._learner.clip_ratio_low,
            "clip_high_threshold": 1 + self._learner.clip_ratio_high,
        }
        loss_config = None if self._settings.loss == "importance_sampling" else clips
        forward_future = self._model.forward_backward(data, self._settings.loss, loss_fn_config=loss_config)
        step_future = self._model.optim_step(
            tinker.AdamParams(learning_rate=rate, beta1=0.9, beta2=0.95, grad_clip_norm=self._learner.max_grad_norm)
        )
        output = forward_future.result(timeout=CALL_SECONDS)
        step_metrics = step_future.result(timeout=CALL_SECONDS).metrics or {}
        self._updates += 1
        for sequence, outputs in zip(part, output.loss_fn_outputs, strict=True):
            measured.add(sequence, np.asarray(outputs["logprobs"].data, np.float32), fresh)
        return next((float(value) for name, value in step_metrics.items() if "grad_norm" in name), math.nan)


def _write_atomically(file: Path, content: msgspec.Struct) -> None:
    """All of it or nothing, as a reader of ``file`` sees it."""
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_name(f".{file.name}.{uuid4().hex}")
    temporary.write_bytes(msgspec.json.encode(content))
    temporary.replace(file)
