"""`FleetbusRollouts` on a deployment in one process whose environments fail, with a trainer that takes its rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from fleetbus.client.rollouts import RolloutGroup
from fleetbus.errors import UserError
from fleetbus_schemas import Task
from fleetbus_workers.trainers import trl_rollout_func
from fleetbus_workers.trainers.trl_rollout_func import FleetbusRollouts
from tests.unit.test_trainer_formats import episode

TRAINER = SimpleNamespace(args=SimpleNamespace(temperature=0.7))


def make(patch: pytest.MonkeyPatch, play: Callable[[Task, int], RolloutGroup], **arguments: Any) -> FleetbusRollouts:
    """Groups come from ``play(task, size)`` instead of from workers."""
    tasks = [{"key": key, "prompt": "Count.", "env_key": "x"} for key in ("a", "b")]
    rollouts = FleetbusRollouts(tasks=tasks, name="r1", publish=False, **arguments)
    rollouts._bus = object()  # type: ignore[assignment]
    patch.setattr(
        trl_rollout_func, "rollouts", lambda bus, configuration, tasks, group_size, **_: Groups(tasks, group_size, play)
    )
    return rollouts


class Groups:
    def __init__(self, tasks: list[Task], size: int, play: Callable[[Task, int], RolloutGroup]) -> None:
        self._groups = [play(task, size) for task in tasks]

    async def __aenter__(self) -> Groups:
        return self

    async def __aexit__(self, *_: object) -> None: ...

    def __aiter__(self) -> Groups:
        return self

    async def __anext__(self) -> RolloutGroup:
        if not self._groups:
            raise StopAsyncIteration
        return self._groups.pop()


def test_rows_are_in_the_order_of_the_prompts_and_tasks_are_played_as_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: Counter[tuple[str, int]] = Counter()

    def play(task: Task, size: int) -> RolloutGroup:
        asked[task.key, size] += 1
        return RolloutGroup(task=task, episodes=tuple(episode(1.0 if task.key == "a" else 0.5) for _ in range(size)))

    rollouts = make(monkeypatch, play)
    rows = rollouts(["a", "a", "b", "b"], TRAINER)
    assert rows["episode_reward"] == [1.0, 1.0, 0.5, 0.5]
    assert asked == {("a", 2): 1, ("b", 2): 1}
    rollouts.close()


def test_only_what_failed_is_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, int]] = []

    def play(task: Task, size: int) -> RolloutGroup:
        asked.append((task.key, size))
        failed = size == 4
        return RolloutGroup(task=task, episodes=(episode(None if failed else 0.0), *[episode(1.0)] * (size - 1)))

    rollouts = make(monkeypatch, play)
    rows = rollouts(["a"] * 4, TRAINER)
    assert sorted(rows["episode_reward"]) == [0.0, 1.0, 1.0, 1.0]
    assert asked == [("a", 4), ("a", 1)]
    assert rollouts.excluded == {"env_failed": 1}
    rollouts.close()


def test_a_row_that_failed_each_time_is_not_trained_and_has_no_reward(monkeypatch: pytest.MonkeyPatch) -> None:
    def play(task: Task, size: int) -> RolloutGroup:
        return RolloutGroup(task=task, episodes=tuple(episode(None if task.key == "b" else 1.0) for _ in range(size)))

    rollouts = make(monkeypatch, play, retries=1)
    rows = rollouts(["b", "a"], TRAINER)
    assert rows["episode_reward"] == [None, 1.0]
    assert rows["env_mask"][0] == [0] and rows["logprobs"][0] == [0.0]
    assert len(rows["completion_ids"][0]) == len(rows["prompt_ids"][0]) == 1
    assert rollouts.reward([], rows["episode_reward"]) == [None, 1.0]
    assert rollouts.excluded == {"env_failed": 2}
    rollouts.close()


def test_a_batch_of_failures_alone_is_an_error_with_their_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    rollouts = make(monkeypatch, lambda task, size: RolloutGroup(task=task, episodes=(episode(None),) * size), retries=0)
    with pytest.raises(RuntimeError, match="no episode of 2 was played: env_failed"):
        rollouts(["a", "a"], TRAINER)
    rollouts.close()


def test_a_prompt_of_another_data_set_is_refused_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    rollouts = make(monkeypatch, lambda task, size: RolloutGroup(task=task, episodes=()))
    with pytest.raises(UserError, match="'elsewhere' is the key of no task"):
        rollouts(["elsewhere"], TRAINER)
