"""The protocol of a trainer: batches of token sequences in, a new version of the weights out.

All calls block and run outside the event loop, one at a time.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

import msgspec
import numpy as np
from numpy.typing import NDArray

from fleetbus_schemas import TensorEntry
from fleetbus_workers.images.placed_image import PlacedImage


class TrainingSequence(msgspec.Struct, frozen=True, kw_only=True):
    """One leaf of a graded episode as the trainer sees it, every array of length T (tokens of its whole sequence). Most
    episodes have one leaf, ``segment`` 0.

    ``ids`` int32; ``loss_mask`` bool, True where the policy sampled what no leaf before this one holds; ``logprobs`` float32,
    the sampler's, 0 elsewhere; ``advantages`` float32, 0 elsewhere; ``versions`` int32, the one policy version that sampled
    each token, -1 elsewhere and where weights were swapped within a turn. ``images`` are those that ``ids`` show, in order.
    ``places`` int64: where the tokens stand among those of all turns of the episode; None: they are all of these.
    """

    episode_id: str
    group_id: str
    ids: NDArray[np.int32]
    loss_mask: NDArray[np.bool_]
    logprobs: NDArray[np.float32]
    advantages: NDArray[np.float32]
    versions: NDArray[np.int32]
    temperature: float = 1.0
    images: tuple[PlacedImage, ...] = ()
    segment: int = 0
    places: NDArray[np.int64] | None = None


class SequenceTokens(msgspec.Struct, frozen=True, kw_only=True):
    """The N tokens of a sequence that were trained, with arrays of length N: ``places`` int64 among the tokens of all turns of
    the episode, and `fleetbus.recording.token_record.TrainedTokens` for the others: float32, float32 and bool."""

    episode_id: str
    places: NDArray[np.int64]
    logprobs: NDArray[np.float32]
    gradients: NDArray[np.float32]
    clipped: NDArray[np.bool_]


FinishWriting = Callable[[], None]
"""Blocks until what was begun is on the disk. Raises `OSError`."""


class SavesWeights(Protocol):
    """The owner of the weights that versions are made of."""

    def save_weights(self, file: Path) -> tuple[TensorEntry, ...]:
        """Write the weights as safetensors (atomically: temporary file, fsync, rename) and return the manifest."""


class Trainer(SavesWeights, Protocol):
    """A model with its optimizer."""

    @property
    def vocabulary(self) -> int:
        """Token ids are below it: an episode with others is not trained, with a reason. 0: unknown."""

    def check_images(self, episode_id: str, ids: NDArray[np.int32], images: Sequence[PlacedImage]) -> None:
        """Raise `ImageFailed` if ``images`` do not become the tokens that stand for them in ``ids`` [T], those of a whole
        episode: it is not trained, with a reason."""

    def train(self, batch: Sequence[TrainingSequence], *, version: int, progress: float) -> dict[str, float]:
        """Update on the whole batch (one or more optimizer steps as configured) and return metrics, at least ``loss``,
        ``grad_norm``, ``entropy``, ``clip_fraction``, ``ratio_max``, ``logprob_difference_max`` and ``_mean`` (over tokens
        that were sampled by ``version``, the weights before this update; NaN if none, and they may be missing where the batch
        has no sampled token) and ``tokens``. ``progress`` is in [0, 1)."""

    def save_model(self, folder: Path) -> None:
        """Write a folder that transformers' ``from_pretrained`` loads, tokenizer included."""

    def start_checkpoint(self, folder: Path) -> FinishWriting | None:
        """Write into an empty folder all that `restore` needs: weights, optimizer, schedule, random states. Or take it as it is
        now, and return what waits until it is written, which may be called beside other calls; both raise `OSError`."""

    def restore(self, folder: Path) -> None:
        """Continue from what `start_checkpoint` wrote."""


@runtime_checkable
class MeasuresEpisodes(Protocol):
    """A trainer that knows of each episode how far it and the sampler are apart."""

    @property
    def differences(self) -> Mapping[str, float]:
        """Of the last call of `Trainer.train`, by episode: the mean size of the difference between the log-probabilities of
        sampler and trainer, in nats, over tokens that were sampled by the weights before the update; no other episodes."""


@runtime_checkable
class TracesTokens(Protocol):
    """A trainer that notes what it did with each token."""

    @property
    def traced_tokens(self) -> Sequence[SequenceTokens]:
        """Of the last call of `Trainer.train`, by sequence; empty if the settings ask for no token record."""
