"""Held-out tasks by hash: exact counts, stable sides."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetbus.core.splits import key_hash, split_tasks
from schemas import Task


def make_tasks(count: int, env: str = "a") -> list[Task]:
    return [Task(key=f"{env}-{index}", env=env) for index in range(count)]


@pytest.mark.parametrize(
    ("count", "held_out"), [(1, 0), (2, 1), (9, 1), (10, 1), (20, 2), (29, 2), (300, 30), (301, 30), (5000, 30)]
)
def test_the_number_of_held_out_tasks_is_exact(count: int, held_out: int) -> None:
    train, evaluation = split_tasks(make_tasks(count))
    assert (len(train), len(evaluation)) == (count - held_out, held_out)


def test_each_environment_is_split_on_its_own() -> None:
    train, evaluation = split_tasks([*make_tasks(40, "a"), *make_tasks(3, "b"), *make_tasks(400, "c")])
    assert [sum(task.env == env for task in evaluation) for env in "abc"] == [4, 1, 30]
    assert len(train) + len(evaluation) == 443


def test_ratios_are_not_bitten_by_floating_point() -> None:
    assert len(split_tasks(make_tasks(100), eval_ratio=0.29)[1]) == 29


def test_the_hash_is_the_one_of_fleets_data_preparation() -> None:
    assert key_hash("task-001") == 0x9FD0C6AFB396CB2C / 2**64


@given(keys=st.lists(st.text(max_size=8), unique=True, max_size=60), data=st.data())
def test_order_does_not_matter_and_is_kept(keys: list[str], data: st.DataObject) -> None:
    tasks = [Task(key=key, env="a") for key in keys]
    shuffled = data.draw(st.permutations(tasks))
    train, evaluation = split_tasks(tasks)
    other_train, other_evaluation = split_tasks(shuffled)
    assert {task.key for task in evaluation} == {task.key for task in other_evaluation}
    assert [task for task in tasks if task in train] == train
    assert [task for task in shuffled if task in other_train] == other_train


def test_a_new_task_moves_at_most_the_boundary() -> None:
    tasks = make_tasks(105)
    before = {task.key for task in split_tasks(tasks[:100])[1]}
    after = {task.key for task in split_tasks(tasks)[1]}
    newcomers = {task.key for task in tasks[100:]}
    assert len(before - after) == len(after & newcomers), "a task leaves only where a newcomer took its place"


def test_a_senseless_ratio_is_refused() -> None:
    with pytest.raises(ValueError, match="between 0 and 1"):
        split_tasks(make_tasks(3), eval_ratio=1.5)
