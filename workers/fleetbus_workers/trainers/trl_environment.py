"""A run's environments as the ``environment_factory`` of TRL's `GRPOTrainer`: TRL samples, environment workers play.

    environments = FleetbusEnvironments(url="nats://host:4222", run="r1", tasks="tasks.json")
    trainer = GRPOTrainer(model, environments.reward, args, environments.dataset, environment_factory=environments.factory)

Needs TRL 1.16 (the extra ``trl``), and no inference worker.
"""

from __future__ import annotations

import atexit
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from fleetbus.concurrency.task_groups import open_first_error_task_group
from fleetbus_workers.trainers.sampled_episode import EpisodeSource, Tasks
from fleetbus_workers.trainers.trl_episode import TrlEnvironment, build_class


class FleetbusEnvironments:
    """Environments of a run's tasks for one trainer; ``bounds`` are those of `EpisodeSource` (``timeout``, ``max_turns``: TRL's
    own limits end an episode, too). An episode that cannot begin is begun again, ``retries`` times. Raises `UserError`."""

    def __init__(self, *, tasks: Tasks, url: str = "", run: str = "default", **bounds: Any) -> None:
        self._source = EpisodeSource.open(None, url=url, run=run, tasks=tasks, **({"max_turns": 2**31} | bounds))
        self._classes: dict[str, type[TrlEnvironment]] = {}
        self._made: list[TrlEnvironment] = []
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
        the environment failed, or there is no verdict: TRL leaves it out of the group's mean. Raises `RuntimeError` if no
        episode of a batch could be played."""
        ours = {
            index: each for index, each in enumerate(environments) if isinstance(each, TrlEnvironment) and each in self._made
        }
        rewards: list[float | None] = [None] * len(environments)

        async def finish(index: int) -> None:
            rewards[index] = await ours[index]._finish(completions[index])

        async def finish_all() -> None:
            async with open_first_error_task_group() as finishing:
                for index in ours:
                    finishing.start_soon(finish, index)

        self._source.client.call(finish_all)
        failures = [each.failure for each in ours.values() if each.failure]
        self.excluded += len(failures)
        if failures and len(failures) == len(ours):
            raise RuntimeError(f"no episode of {len(ours)} was played: {failures[0]}")
        return rewards

    def close(self) -> None:
        """Release environments that a trainer left in the middle of an episode."""
        for environment in self._made:
            environment._release()

    def _make(self, kind: str) -> TrlEnvironment:
        if kind not in self._classes:
            key = next(task.key for task in self._source.tasks.values() if task.env == kind)
            self._classes[kind] = build_class(self._source, key)
        self._made.append(self._classes[kind](self._source))
        return self._made[-1]
