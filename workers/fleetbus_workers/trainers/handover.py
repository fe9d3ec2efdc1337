"""Batches to a trainer of others, which runs in another thread of this process, and its word of what it has trained.

The learner gives whole batches, the trainer takes rows; so many rows make one of its optimizer steps. A batch is whole steps:
where rows are missing, fillers end it. The trainer looks ``rows_ahead`` beyond the step that it is in, so that a batch is
trained once the next one is given, or once fillers stand for it.
"""

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

from fleetbus_workers.trainers.rows import Row, spread_fillers

T = TypeVar("T")

RELEASE_SECONDS = 30.0
"""How long a checkpoint waits for the batch after its own, with no row left to train, before fillers stand for it."""
CHECK_SECONDS = 1.0


class TrainerEnded(Exception):
    """The other trainer has ended, so that what was waited for will not come."""


class StepEnd(NamedTuple):
    """The sequel of an optimizer step: a checkpoint; the end of training."""

    save: bool
    stop: bool


class Handover:
    """Between one learner and one trainer. All methods may be called from any thread.

    ``rows_per_step``: of an optimizer step over all processes; ``rows_ahead``: those that are taken at once.
    """

    def __init__(self, *, rows_per_step: int, rows_ahead: int) -> None:
        self._rows_per_step = rows_per_step
        self._rows_ahead = rows_ahead
        self._changed = threading.Condition()
        self._rows: deque[Row] = deque()
        self._given_rows = 0
        self._steps_with_rows: set[int] = set()
        """The steps, from 0, that are not done and have a row that is no filler."""
        self._filler: Row | None = None
        self._batch = 0
        self._last = 0
        self._released = 0
        self._ends: deque[tuple[int, int]] = deque()
        """Of each batch that is not trained its number, and the optimizer steps once it is."""
        self._steps = 0
        self._trained = 0
        self._wanted: set[int] = set()
        self._saving = 0
        """The batch that ended with the step that is to be followed by a checkpoint."""
        self._saved: dict[int, Path] = {}
        self._began: int | None = None
        self.history = ""
        """What the trainer says of the steps before those, as `fleetbus_workers.trainers.trainer.read_history` returns it."""
        self._closed = ""
        self.metrics: dict[str, float] = {}
        """What the trainer said last of its steps."""

    @property
    def is_complete(self) -> bool:
        """True once the last batch is trained and saved."""
        with self._changed:
            return self._last in self._saved

    # The learner's side: every wait raises `TrainerEnded`.

    def give(self, rows: Sequence[Row], filler: Row, *, is_last: bool) -> int:
        """Give the next batch and return its number, from 1. It takes one step at least."""
        with self._changed:
            self._check_open()
            self._filler = filler
            missing = -(self._given_rows + len(rows)) % self._rows_per_step
            if not rows and not missing:
                missing = self._rows_per_step
            self._append(list(spread_fillers(rows, filler, missing)))
            self._batch += 1
            self._ends.append((self._batch, self._given_rows // self._rows_per_step))
            if is_last:
                self._last = self._batch
                self._release()
            return self._batch

    def wait_trained(self, batch: int) -> None:
        """Return once that batch is trained."""
        self._wait(lambda: self._trained >= batch or None)

    def request_save(self, batch: int) -> None:
        """Ask for a checkpoint of the state after that batch, which is not trained yet."""
        with self._changed:
            self._wanted.add(batch)

    def wait_saved(self, batch: int) -> Path:
        """The trainer's checkpoint after that batch, which was asked for."""
        release_at = time.monotonic() + RELEASE_SECONDS

        def find() -> Path | None:
            nonlocal release_at
            if self._rows:
                release_at = time.monotonic() + RELEASE_SECONDS
            elif batch not in self._saved and time.monotonic() >= release_at and self._batch == batch > self._released:
                self._release()
            return self._saved.get(batch)

        return self._wait(find)

    def wait_began(self) -> int:
        """The trainer's optimizer steps so far when it began: not 0 if it has restored a checkpoint of its own."""
        return self._wait(lambda: self._began)

    # The trainer's side.

    def begin(self, step: int, history: str = "") -> None:
        """Say with how many optimizer steps the trainer begins, and what it knows of them."""
        with self._changed:
            self._began, self.history = step, history
            self._changed.notify_all()

    def take(self, timeout: float | None) -> Row:
        """The next row. Raises `queue.Empty`, at once where no more is trained."""
        with self._changed:
            self._changed.wait_for(lambda: self._rows or self._closed, timeout)
            if not self._rows:
                raise queue.Empty
            return self._rows.popleft()

    def __len__(self) -> int:
        with self._changed:
            return len(self._rows)

    def is_filler_step(self) -> bool:
        """True if fillers are all that the present step has, whose rows were taken: it is to change nothing."""
        with self._changed:
            return self._steps not in self._steps_with_rows

    def end_step(self) -> StepEnd:
        """Say that an optimizer step is done and its weights are sent."""
        with self._changed:
            self._steps_with_rows.discard(self._steps)
            self._steps += 1
            before = self._trained
            while self._ends and self._ends[0][1] <= self._steps:
                self._trained = self._ends.popleft()[0]
            is_end = self._trained > before
            self._changed.notify_all()
            is_last = is_end and self._trained == self._last
            is_saved = is_last or (is_end and self._trained in self._wanted)
            self._saving = self._trained if is_saved else 0
            return StepEnd(save=is_saved, stop=is_last)

    def save(self, folder: Path) -> None:
        """Say that the trainer's state is in ``folder``. After other steps than those that `end_step` said nobody asked."""
        with self._changed:
            if self._saving:
                self._wanted.discard(self._saving)
                self._saved = dict([*self._saved.items(), (self._saving, folder)][-2:])  # the last comes beside one before it
                self._saving = 0
                self._changed.notify_all()

    def close(self, reason: str) -> None:
        """Say that no more is trained: whoever waits is told."""
        with self._changed:
            self._closed = self._closed or reason
            self._changed.notify_all()

    def _wait(self, find: Callable[[], T | None]) -> T:
        with self._changed:
            while (found := find()) is None:
                self._check_open()
                self._changed.wait(CHECK_SECONDS)
            return found

    def _check_open(self) -> None:
        if self._closed:
            raise TrainerEnded(self._closed)

    def _append(self, rows: list[Row]) -> None:
        self._rows.extend(rows)
        places = enumerate(rows, self._given_rows)
        self._steps_with_rows |= {place // self._rows_per_step for place, row in places if not row.is_filler}
        self._given_rows += len(rows)
        self._changed.notify_all()

    def _release(self) -> None:
        """Let the trainer end the batch that was given last, as if there were another."""
        assert self._filler is not None
        self._released = self._batch
        self._append([self._filler] * self._rows_ahead)
