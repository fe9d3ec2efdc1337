"""`HandoverTrainer`: the learner's trainer where the model, its optimizer and its loop are another library's.

The learner asks, grades, excludes, audits and resumes as with its own trainer. A batch is trained while the next one is
gathered, so that the weights of a version lack the batch before it; those of the last step do not.
"""

import hashlib
import json
import math
import shutil
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from fleetbus.errors import UserError
from fleetbus_schemas import TensorEntry
from fleetbus_schemas.message import UNREADABLE
from fleetbus_workers.images.placed_image import PlacedImage
from fleetbus_workers.images.reader import ImageFailed
from fleetbus_workers.learner.base import FinishWriting, TrainingSequence
from fleetbus_workers.learner.checkpoints import STATE
from fleetbus_workers.trainers.handover import Handover
from fleetbus_workers.trainers.rows import build_filler, build_rows
from fleetbus_workers.trainers.weights import SentWeights

_OF_TRAINING = ("optimizer", "scheduler", "rng_state", "scaler", "trainer_state", "training_args")
"""How the files of a checkpoint begin that are not the model's."""

_ELSEWHERE = "restore it, or begin elsewhere with learner.restart_from"


class TrainerState(msgspec.Struct, frozen=True, kw_only=True, tag="handover"):
    """A checkpoint's state: the folder of the other trainer's own checkpoint, its optimizer steps, and the SHA-256 of its files
    by name."""

    folder: str
    step: int
    sha256: dict[str, str]


class HandoverTrainer:
    """`fleetbus_workers.learner.base.Trainer` over a `Handover`. ``steps``: those of the learner. Images are refused."""

    vocabulary = 0

    def __init__(self, handover: Handover, weights: SentWeights, *, steps: int) -> None:
        self._handover = handover
        self._weights = weights
        self._steps = steps
        self._given = 0
        self._begin_step = 0
        self._saved_folder: Path | None = None

    def check_images(self, episode_id: str, ids: NDArray[np.int32], images: Sequence[PlacedImage]) -> None:
        """Raise `ImageFailed` if there are any."""
        if images:
            raise ImageFailed("this trainer takes text alone")

    def train(self, batch: Sequence[TrainingSequence], *, version: int, progress: float) -> dict[str, float]:
        """Give the batch, and return once the one before is trained; the last one once it is itself. Metrics are what the
        trainer said last: those of the batch before."""
        self._check_begin()
        done = round(progress * self._steps) + 1
        is_last = done >= self._steps
        rows = list(build_rows(batch))
        self._given = self._handover.give(rows, build_filler(rows), is_last=is_last)
        self._handover.wait_trained(self._given if is_last else self._given - 1)
        unknown = dict.fromkeys(("loss", "grad_norm", "entropy", "clip_fraction"), math.nan)
        tokens = float(sum(int(row.loss_mask.sum()) for row in rows))
        return {**unknown, **self._handover.metrics, "tokens": tokens, "rows": float(len(rows))}

    def save_weights(self, file: Path) -> tuple[TensorEntry, ...]:
        """See `Trainer.save_weights`: the newest that were sent."""
        return self._weights.save_weights(file)

    def save_model(self, folder: Path) -> None:
        """See `Trainer.save_model`: the model's files of the trainer's last checkpoint."""
        if self._saved_folder is None:
            raise UserError("the trainer has stored no checkpoint, so there is no model to save")
        folder.mkdir(parents=True, exist_ok=True)
        for file in self._saved_folder.iterdir():
            if file.is_file() and not file.name.startswith(_OF_TRAINING):
                shutil.copy2(file, folder / file.name)

    def start_checkpoint(self, folder: Path) -> FinishWriting:
        """See `Trainer.start_checkpoint`: the trainer stores its own after this batch, and its name and digests go here."""
        batch = self._given
        self._handover.request_save(batch)

        def finish() -> None:
            self._saved_folder = saved = self._handover.wait_saved(batch)
            state = TrainerState(folder=str(saved), step=read_step(saved), sha256=hash_files(saved))
            (folder / STATE).write_bytes(msgspec.json.encode(state))

        return finish

    def restore(self, folder: Path) -> None:
        """See `Trainer.restore`: the trainer has begun at the same place by itself, or it is refused. Raises `UserError`."""
        state = read_state(folder)
        began = self._handover.wait_began()
        if began != state.step:
            raise UserError(
                f"the trainer began after {began} of its steps, the run goes on after {state.step}: give it the checkpoint "
                f"{state.folder} (train(resume_from_checkpoint=rollouts.find_checkpoint()))"
            )
        if read_history(Path(state.folder)) not in ("", self._handover.history):
            raise UserError(
                f"the trainer began after {began} of its steps from another checkpoint than {state.folder}: give it that one "
                "(train(resume_from_checkpoint=rollouts.find_checkpoint()))"
            )
        self._begin_step, self._saved_folder = began, Path(state.folder)

    def _check_begin(self) -> None:
        if (began := self._handover.wait_began()) != self._begin_step:
            raise UserError(
                f"the trainer began after {began} of its steps, but the run has no checkpoint that says what they were"
            )


def read_state(folder: Path) -> TrainerState:
    """Read what `HandoverTrainer.start_checkpoint` wrote. Raises `UserError` if it is not, or if the trainer's own is not
    whole."""
    file = folder / STATE
    try:
        state = msgspec.json.decode(file.read_bytes(), type=TrainerState)
    except (OSError, *UNREADABLE) as error:
        raise UserError(f"{file} is not a checkpoint of a trainer that fleetbus hands batches to: {error}") from error
    try:
        found = hash_files(Path(state.folder))
    except OSError as error:
        raise UserError(f"the trainer's checkpoint {state.folder} cannot be read: {error}; {_ELSEWHERE}") from error
    if broken := [name for name, digest in state.sha256.items() if found.get(name) != digest]:
        names = ", ".join(sorted(broken))
        raise UserError(f"the trainer's checkpoint {state.folder} is not as it was stored: {names}; {_ELSEWHERE}")
    return state


def hash_files(folder: Path) -> dict[str, str]:
    """The SHA-256 of each file of a folder by its path in it; parts of sharded models stand deeper. Blocking; raises
    `OSError`."""
    found = {}
    folder.stat()  # of one that is not there nothing would be listed
    for file in sorted(folder.rglob("*")):
        if file.is_file():
            with file.open("rb") as stream:
                found[file.relative_to(folder).as_posix()] = hashlib.file_digest(stream, "sha256").hexdigest()
    return found


def read_history(folder: Path) -> str:
    """All that a checkpoint of transformers' `Trainer` has logged, as `format_history`; empty if it says nothing."""
    try:
        return format_history(json.loads((folder / "trainer_state.json").read_bytes())["log_history"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def format_history(logged: list[dict[str, float]]) -> str:
    """Losses of two runs differ, though their steps are as many; empty if there are none."""
    return json.dumps(logged, sort_keys=True) if logged else ""


def read_step(folder: Path) -> int:
    """The optimizer steps of a checkpoint of transformers' `Trainer`: its folder is ``checkpoint-STEP``."""
    return int(folder.name.rpartition("-")[2])
