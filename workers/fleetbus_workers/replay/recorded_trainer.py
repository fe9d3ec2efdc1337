"""A trainer that does not train: it compares each batch with the recording and returns the recorded metrics of the step.

So a learner can be replayed without a model: its requests, groups, advantages, batches and lineage are its own; losses,
gradients and weights are the recorded ones and are not checked.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleetbus.core.algorithms.shaping import TruncationMask, is_masked
from fleetbus.core.training.own_seats import find_last_finish, select_own_seats
from fleetbus.log.episodes import decode_entries
from fleetbus_schemas import Action, PolicyPublished, StepTrained, TensorEntry
from fleetbus_workers.images.placed_image import PlacedImage
from fleetbus_workers.images.reader import ImageMismatch, ImageUnreadable
from fleetbus_workers.learner.base import TrainingSequence
from fleetbus_workers.learner.checkpoints import STATE
from fleetbus_workers.learner.leaves import Leaf, is_whole, list_leaves
from fleetbus_workers.replay.compare import Found
from fleetbus_workers.replay.recorded_episode import RecordedEpisode

_VERSION = re.compile(r"l\d+-v(\d+)\.safetensors")


class RecordedTrainer:
    """`Trainer` of a recorded lineage that began at step ``start``. ``steps`` and ``versions`` by number; ``on_difference`` is
    called with the step, the episode's id and the first value of a batch that is not the recorded one. ``sequences`` and
    ``tokens`` count what was compared."""

    vocabulary = 0

    def __init__(
        self,
        start: int,
        steps: Mapping[int, StepTrained],
        versions: Mapping[int, PolicyPublished],
        *,
        episodes: Mapping[str, RecordedEpisode],
        on_difference: Callable[[int, str, Found], None],
        truncation_mask: TruncationMask,
        policy: str = "",
    ) -> None:
        self._steps = steps
        self._versions = versions
        self._episodes = episodes
        self._on_difference = on_difference
        self._truncation_mask = truncation_mask
        self._policy = policy
        self._step = start
        self._excluded = {each.episode_id: each.reason for step in steps.values() for each in step.excluded}
        self.sequences = 0
        self.tokens = 0

    @property
    def differences(self) -> Mapping[str, float]:
        """Those of the recorded step."""
        recorded = self._steps.get(self._step)
        measured = zip(recorded.episodes, recorded.differences, strict=False) if recorded is not None else ()
        return {episode: size for episode, size in measured if size >= 0}

    def check_images(self, episode_id: str, ids: NDArray[np.int32], images: Sequence[PlacedImage]) -> None:
        """Raise what the recorded trainer raised, by the reason for which the episode was excluded."""
        for failed in (ImageMismatch, ImageUnreadable):
            if self._excluded.get(episode_id) == failed.error_class:
                raise failed(f"episode {episode_id} was excluded, {failed.error_class}")

    def train(self, batch: Sequence[TrainingSequence], *, version: int, progress: float) -> dict[str, float]:
        """The metrics of the recorded step, but for the tokens, which are counted."""
        self._step += 1
        for sequence in batch:
            found = next(self._find_differences(sequence), None)
            if found is not None:
                self._on_difference(self._step, sequence.episode_id, found)
                break
            self.sequences += 1
        tokens = sum(int(sequence.loss_mask.sum()) for sequence in batch)
        self.tokens += tokens
        recorded = self._steps.get(self._step)
        return (dict(recorded.metrics) if recorded is not None else {}) | {"tokens": float(tokens)}

    def save_weights(self, file: Path) -> tuple[TensorEntry, ...]:
        """An empty file of the recorded size, and the recorded manifest."""
        version = _VERSION.fullmatch(file.name)
        published = self._versions.get(int(version[1])) if version else None
        with file.open("wb") as empty:
            empty.truncate(published.size_bytes if published else 0)
        return published.manifest if published else ()

    def save_model(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)

    def start_checkpoint(self, folder: Path) -> None:
        (folder / STATE).touch()

    def restore(self, folder: Path) -> None:
        """There is no state to restore."""

    def _find_differences(self, sequence: TrainingSequence) -> Iterator[Found]:
        episode = self._episodes.get(sequence.episode_id)
        if episode is None or episode.result is None:
            yield Found("episode_id", repr("(nothing)"), repr(sequence.episode_id))
            return
        mask, segment = self._truncation_mask, sequence.segment
        recorded_fields = build_sequence(episode, truncation_mask=mask, segment=segment, policy=self._policy)
        for field, recorded in recorded_fields.items():
            replayed = np.asarray(getattr(sequence, field))
            if len(recorded) != len(replayed):
                yield Found(f"{field} (length)", repr(len(recorded)), repr(len(replayed)))
            elif not np.array_equal(recorded, replayed):
                place = int(np.nonzero(recorded != replayed)[0][0])
                yield Found(f"{field}[{place}]", repr(recorded[place].item()), repr(replayed[place].item()))


def build_sequence(
    episode: RecordedEpisode, *, truncation_mask: TruncationMask, segment: int = 0, policy: str = ""
) -> dict[str, NDArray[np.generic]]:
    """The training sequence of one leaf of a recorded episode without its advantages: arrays [T] by field. ``policy``: that of
    a learner which joined the episode, empty for the one that asked for it."""
    actions = [action for _, action in decode_entries(Action, episode.result_actions)]
    parts: dict[str, list[NDArray[np.generic]]] = {"ids": [], "loss_mask": [], "logprobs": [], "versions": []}
    for action in actions:
        prompt, sampled = (np.frombuffer(packed, "<u4") for packed in (action.prompt_delta, action.sampled))
        version = action.versions[0].version if len(action.versions) == 1 else -1
        parts["ids"] += [prompt, sampled]
        parts["loss_mask"] += [np.zeros(len(prompt), bool), np.ones(len(sampled), bool)]
        parts["logprobs"] += [np.zeros(len(prompt), np.float32), np.frombuffer(action.logprobs, "<f4")]
        parts["versions"] += [np.full(len(prompt), -1), np.full(len(sampled), version)]
    whole = {name: np.concatenate(arrays) if arrays else np.zeros(0) for name, arrays in parts.items()}
    result = select_own_seats(episode.result, policy) if episode.result is not None else None
    if result is not None and is_masked(truncation_mask, result.outcome, find_last_finish(result, actions)):
        whole |= {"loss_mask": np.zeros_like(whole["loss_mask"]), "logprobs": np.zeros_like(whole["logprobs"])}
        whole["versions"] = np.full_like(whole["versions"], -1)
    leaves = list_leaves(actions)
    if is_whole(leaves) and segment == 0:
        return whole
    chosen = [leaf for leaf in leaves if leaf.segment.number == segment]
    return {name: _take_leaf(array, leaf, name, whole["loss_mask"]) for leaf in chosen[:1] for name, array in whole.items()}


def _take_leaf(array: NDArray[Any], leaf: Leaf, name: str, mask: NDArray[Any]) -> NDArray[Any]:
    """One field of a leaf; what an earlier leaf trains is masked as the trainer was given it."""
    repeated = {"loss_mask": False, "logprobs": 0.0, "versions": -1}
    places = leaf.places
    taken = array[places]
    return np.where(mask[places].astype(bool) & leaf.first, taken, repeated[name]) if name in repeated else taken
