"""A run's environments as the ``environment_factory`` of TRL's `GRPOTrainer`: TRL samples, environment workers play.

    environments = FleetbusEnvironments(url="nats://host:4222", run="r1", tasks="tasks.json")
    trainer = GRPOTrainer(model, environments.reward, args, environments.dataset, environment_factory=environments.factory)

Needs TRL 1.16 (the extra ``trl``), and no inference worker.
"""

from __future__ import annotations

import atexit
from collections.abc import Callable, Coroutine, Iterable, Sequence
from functools import partial
from typing import Any

from fleetbus.concurrency.task_groups import open_first_error_task_group
from fleetbus_workers.trainers.sampled_episode import EpisodeSource, Tasks
from fleetbus_workers.trainers.trl_episode import TrlEnvironment, build_class

FAILED_IN_A_ROW = 16
"""So many episodes, of whole batches, fail before the trainer ends: it trains on nothing. One task's failures are fewer."""


class FleetbusEnvironments:
    """Environments of a run's tasks for one trainer; ``bounds`` are those of `EpisodeSource` (``timeout``, ``max_turns``: TRL's
    own limits end an episode, too). An episode that cannot begin is begun again, ``retries`` times. Raises `UserError`."""

    def __init__(self, *, tasks: Tasks, url: str = "", run: str = "default", **bounds: Any) -> None:
        self._source = EpisodeSource.open(None, url=url, run=run, tasks=tasks, **({"max_turns": 2**31} | bounds))
        self._classes: dict[str, type[TrlEnvironment]] = {}
        self._made: list[TrlEnvironment] = []
        self._failed_in_a_row = 0
        self.excluded = 0
        """Episodes without a reward, because their environment failed or there was no verdict."""
        atexit.register(self.close)

    @property
    def dataset(self) -> Any:
        """A row per task: ``task_key``, an empty ``prompt`` (the environment's takes its place), and, where tasks have several
        environment keys, ``environment``."""
        from datasets import Dataset

        tasks = self._source.tasks
        columns: dict[str, list[Any]] = {"prompt": [[{"role": "user", "content": ""}] for _ in tasks], "task_key": [*tasks]}
        if isinstance(self.factory, dict):
            columns["environment"] = [task.env for task in tasks.values()]
        return Dataset.from_dict(columns)

    @property
    def factory(self) -> Callable[[], TrlEnvironment] | dict[str, Callable[[], TrlEnvironment]]:
        """TRL's ``environment_factory``; where tasks have several environment keys one for each, by its key."""
        made = {kind: partial(self._make, kind) for kind in dict.fromkeys(task.env for task in self._source.tasks.values())}
        return dict(made) if len(made) > 1 else next(iter(made.values()))

    def reward(self, completions: Sequence[Any], environments: Sequence[Any], **_: Any) -> list[float | None]:
        """TRL's reward function: what each policy said last is its last turn, then the episode is graded and closed. None where
        the environment failed, or there is no verdict: TRL leaves it out of the group's mean. Raises `RuntimeError` once
        `FAILED_IN_A_ROW` episodes and no other were given to this process."""
        ours = {
            index: each
            for index, each in enumerate(environments)
            if isinstance(each, TrlEnvironment) and each._source is self._source
        }
        rewards: list[float | None] = [None] * len(environments)

        async def finish(index: int) -> None:
            rewards[index] = await ours[index]._finish(completions[index])

        self._call_side_by_side(partial(finish, index) for index in ours)
        failures = [each.failure for each in ours.values() if each.failure]
        self.excluded += len(failures)
        self._failed_in_a_row = self._failed_in_a_row + len(failures) if len(failures) == len(ours) else 0
        if failures and self._failed_in_a_row >= FAILED_IN_A_ROW:
            raise RuntimeError(f"no episode of the last {self._failed_in_a_row} was played: {failures[0]}")
        return rewards

    def close(self) -> None:
        """Release environments that a trainer left in the middle of an episode."""
        left = [each._episode for each in self._made if each._episode is not None and each._episode.is_open]
        if left:
            self._call_side_by_side(episode.close for episode in left)

    def _call_side_by_side(self, functions: Iterable[Callable[[], Coroutine[Any, Any, None]]]) -> None:
        async def call_all() -> None:
            async with open_first_error_task_group() as calling:
                for function in functions:
                    calling.start_soon(function)

        self._source.client.call(call_all)

    def _make(self, kind: str) -> TrlEnvironment:
        if kind not in self._classes:
            key = next(task.key for task in self._source.tasks.values() if task.env == kind)
            self._classes[kind] = build_class(self._source, key)
        self._made.append(self._classes[kind](self._source))
        return self._made[-1]
