"""A trainer that does not train: it checks each batch against the recording and answers with what was recorded of its step.

So a learner can be replayed without a model: its requests, groups, advantages, batches, lineage and book are its own; losses,
gradients and weights are the recorded ones, and nothing about them is shown.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from fleetbus_schemas import Action, EpisodeFinished, PolicyPublished, StepTrained, TensorEntry
from fleetbus_workers.learner.base import TrainingSequence

_VERSION = re.compile(r"l\d+-v(\d+)\.safetensors")


class Trained(msgspec.Struct, frozen=True, kw_only=True):
    """A recorded episode as it has to come to the trainer: its result, and the Actions that the result names in order."""

    result: EpisodeFinished
    actions: tuple[Action, ...]


class WrongBatch(msgspec.Struct, frozen=True, kw_only=True):
    """The first value of a batch that is not the recorded one."""

    episode_id: str
    field: str
    recorded: str
    replayed: str


class RecordedTrainer:
    """`Trainer` of a recorded lineage that began at step ``start``. ``steps`` and ``versions`` by number; ``episode`` finds
    what was recorded of one; ``wrong`` is told of batches that hold something else. ``sequences`` counts those compared."""

    def __init__(
        self,
        start: int,
        steps: Mapping[int, StepTrained],
        versions: Mapping[int, PolicyPublished],
        *,
        episode: Callable[[str], Trained | None],
        wrong: Callable[[int, WrongBatch], None],
        overlong_masked: bool,
    ) -> None:
        self._steps = steps
        self._versions = versions
        self._episode = episode
        self._wrong = wrong
        self._overlong_masked = overlong_masked
        self._step = start
        self.sequences = 0
        self.tokens = 0

    def train(self, batch: Sequence[TrainingSequence], *, version: int, progress: float) -> dict[str, float]:
        """The metrics of the recorded step, but for the tokens, which are counted."""
        self._step += 1
        for sequence in batch:
            found = next(self._differences(sequence), None)
            if found is not None:
                self._wrong(self._step, found)
                break
            self.sequences += 1
        tokens = float(sum(int(sequence.loss_mask.sum()) for sequence in batch))
        self.tokens += int(tokens)
        recorded = self._steps.get(self._step)
        return (dict(recorded.metrics) if recorded is not None else {}) | {"tokens": tokens}

    def save_weights(self, file: Path) -> tuple[TensorEntry, ...]:
        """A file of the recorded size with nothing in it, and the recorded manifest."""
        named = _VERSION.fullmatch(file.name)
        published = self._versions.get(int(named[1])) if named else None
        with file.open("wb") as empty:
            empty.truncate(published.size_bytes if published else 0)
        return published.manifest if published else ()

    def save_model(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)

    def save_state(self, file: Path) -> None:
        file.touch()

    def restore(self, weights: Path, state: Path) -> None:
        """Nothing was kept, so there is nothing to go on from."""

    def _differences(self, sequence: TrainingSequence) -> Iterator[WrongBatch]:
        trained = self._episode(sequence.episode_id)
        if trained is None:
            yield self._wrong_value(sequence, "episode_id", "(nothing)", sequence.episode_id)
            return
        expected = recorded_sequence(trained, overlong_masked=self._overlong_masked)
        for field, recorded in expected.items():
            replayed = np.asarray(getattr(sequence, field))
            if len(recorded) != len(replayed):
                yield self._wrong_value(sequence, f"{field} (length)", len(recorded), len(replayed))
            elif not np.array_equal(recorded, replayed):
                place = int(np.nonzero(recorded != replayed)[0][0])
                yield self._wrong_value(sequence, f"{field}[{place}]", recorded[place].item(), replayed[place].item())

    def _wrong_value(self, sequence: TrainingSequence, field: str, recorded: object, replayed: object) -> WrongBatch:
        return WrongBatch(episode_id=sequence.episode_id, field=field, recorded=repr(recorded), replayed=repr(replayed))


def recorded_sequence(trained: Trained, *, overlong_masked: bool) -> dict[str, NDArray[np.generic]]:
    """What a training sequence has to be of a recorded episode, advantages apart: arrays of one value per token."""
    parts: dict[str, list[NDArray[np.generic]]] = {"ids": [], "loss_mask": [], "logprobs": [], "versions": []}
    for action in trained.actions:
        prompt, sampled = (np.frombuffer(packed, "<u4") for packed in (action.prompt_delta, action.sampled))
        version = action.versions[0].version if len(action.versions) == 1 else -1
        parts["ids"] += [prompt, sampled]
        parts["loss_mask"] += [np.zeros(len(prompt), bool), np.ones(len(sampled), bool)]
        parts["logprobs"] += [np.zeros(len(prompt), np.float32), np.frombuffer(action.logprobs, "<f4")]
        parts["versions"] += [np.full(len(prompt), -1), np.full(len(sampled), version)]
    whole = {name: np.concatenate(arrays) if arrays else np.zeros(0) for name, arrays in parts.items()}
    if overlong_masked and trained.result.outcome == "truncated":
        whole |= {"loss_mask": np.zeros_like(whole["loss_mask"]), "logprobs": np.zeros_like(whole["logprobs"])}
        whole["versions"] = np.full_like(whole["versions"], -1)
    return whole
