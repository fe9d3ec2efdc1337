"""Orders the tasks: training tasks in a seeded order, epoch after epoch, and the held-out ones that are never trained."""

import random
from collections.abc import Sequence

from fleetbus.core.training.splits import split_tasks
from fleetbus.errors import UserError
from fleetbus.tasks.datasets import redact_location
from fleetbus.tasks.files import load_dataset
from fleetbus_schemas import Task


class Curriculum:
    """``train`` and ``held_out`` tasks; the n-th group's task depends on ``seed`` and n alone."""

    def __init__(self, train: Sequence[Task], held_out: Sequence[Task], *, seed: int) -> None:
        self._train = train
        self._seed = seed
        self._epoch = -1
        self._order: list[int] = []
        self.held_out = held_out

    @property
    def tasks(self) -> list[Task]:
        """All of them, held-out ones last."""
        return [*self._train, *self.held_out]

    def task(self, number: int) -> Task:
        """The task of group ``number``, 0 first; every task comes once per epoch."""
        epoch, position = divmod(number, len(self._train))
        if epoch != self._epoch:
            self._epoch = epoch
            self._order = list(range(len(self._train)))
            random.Random(f"{self._seed}/{epoch}").shuffle(self._order)
        return self._train[self._order[position]]

    def evaluation(self, count: int) -> list[Task]:
        """``count`` held-out tasks, going round when there are fewer."""
        return [self.held_out[index % len(self.held_out)] for index in range(count)] if self.held_out else []


def load_curriculum(path: str, *, seed: int, held_out_share: float = 0.1) -> Curriculum:
    """The tasks at a location (`tasks.datasets`), split by the hash of their keys; raises `UserError` if none is left."""
    train, held_out = load_split(path, held_out_share)
    if not train:
        raise UserError(f"{redact_location(path)}: no training tasks remain after holding out {len(held_out)}; add tasks")
    return Curriculum(train, held_out, seed=seed)


def load_split(path: str, held_out_share: float) -> tuple[list[Task], list[Task]]:
    """Training tasks and held-out ones. So large a share of each environment's is held out, but one at least; 0: none, for
    tasks that are all there is, such as the deals of a game, which without one of them is another game."""
    return split_tasks(load_dataset(path), eval_ratio=held_out_share, min_eval=1 if held_out_share else 0)
