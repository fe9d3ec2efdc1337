"""Held-out tasks by hash: exact counts, stable sides."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleetbus.core.training.splits import hash_key, split_tasks
from fleetbus_schemas import Task


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
    assert hash_key("task-001") == 0x9FD0C6AFB396CB2C / 2**64


@settings(deadline=None)
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


def counts(tasks: list[Task]) -> dict[str, int]:
    return {env: sum(task.env == env for task in tasks) for env in sorted({task.env for task in tasks})}


def test_held_out_environments_are_never_trained() -> None:
    train, evaluation = split_tasks([*make_tasks(40, "a"), *make_tasks(50, "instacart")], held_out=("instacart",))
    assert counts(train) == {"a": 36}
    assert counts(evaluation) == {"a": 4, "instacart": 50}


def test_an_environment_may_be_held_out_for_one_modality_alone() -> None:
    screen = [Task(key=f"s{index}", env="instacart", modality="computer_use") for index in range(20)]
    train, evaluation = split_tasks([*screen, *make_tasks(20, "instacart")], held_out=("computer_use:instacart",))
    assert {task.modality for task in train} == {"tool_use"}
    assert len(evaluation) == 22


def test_an_environment_below_the_least_gives_none_when_that_is_the_rule() -> None:
    """20 %, at most 20, at least 5: an environment needs 25 tasks, and the count is exact where the reference's is not."""
    tasks = [*make_tasks(24, "a"), *make_tasks(25, "b"), *make_tasks(400, "c")]
    _, evaluation = split_tasks(tasks, eval_ratio=0.2, max_eval=20, min_eval=5, all_or_none=True)
    assert counts(evaluation) == {"b": 5, "c": 20}


def test_the_same_task_falls_on_the_same_side_under_any_limit() -> None:
    tasks = make_tasks(300)
    sides = [{task.key for task in split_tasks(tasks, max_eval=most)[1]} for most in (3, 10, 30)]
    assert sides[0] < sides[1] < sides[2]


def test_a_limit_of_all_held_out_tasks_is_shared_in_turns() -> None:
    tasks = [*make_tasks(300, "a"), *make_tasks(200, "b"), *make_tasks(50, "c")]
    train, evaluation = split_tasks(tasks, max_eval_total=30)
    assert counts(evaluation) == {"a": 13, "b": 12, "c": 5}
    assert len(train) == 300 - 30 + 200 - 20 + 50 - 5
    assert counts(split_tasks(tasks, max_eval_total=10)[1]) == {"a": 8, "b": 8, "c": 5}, "the floor stays even beyond it"
    assert split_tasks(tasks, max_eval_total=55) == split_tasks(tasks)


def test_no_environment_is_more_than_its_share_of_the_training_tasks() -> None:
    tasks = [*make_tasks(800, "a"), *(task for env in "bcdefg" for task in make_tasks(40, env))]
    train, _ = split_tasks(tasks, max_env_share=0.2)
    assert counts(train)["a"] == -(-(770 + 6 * 36) // 5)
    assert counts(train)["b"] == 36


@pytest.mark.parametrize("environments", [1, 2, 3])
def test_few_environments_lose_no_more_than_an_equal_part(environments: int) -> None:
    """The reference keeps a fifth of the only environment there is."""
    tasks = [task for index in range(environments) for task in make_tasks(100, f"e{index}")]
    assert len(split_tasks(tasks, max_env_share=0.2)[0]) == 90 * environments


def test_a_senseless_share_is_refused() -> None:
    with pytest.raises(ValueError, match="above 0"):
        split_tasks(make_tasks(3), max_env_share=0)
