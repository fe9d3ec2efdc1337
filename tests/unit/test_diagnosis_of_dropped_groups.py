"""Tasks whose groups are dropped as wholes: named where few steps settle any of them, and not where chance drops groups."""

from __future__ import annotations

import random

import pytest

from tests.support.diagnosed_run import DiagnosedRun, Played, expect

BEGIN = 11


def test_tasks_that_are_dropped_in_groups_are_named_though_few_steps_settle_any_of_them() -> None:
    """Two tasks of 32, which come every fourth step: in two of seven such steps one of them is trained."""
    trained = {(21, "task-1"), (29, "task-0")}

    def drop(played: Played, chance: random.Random) -> None:
        slow = played.task in ("task-0", "task-1") and played.step >= BEGIN
        if slow and (played.step, played.task) not in trained and played.reward is not None:
            played.reason = "stale"

    expect(DiagnosedRun(1, steps=40, plant=drop).diagnose(), "tasks_dropped", BEGIN + 2)


@pytest.mark.parametrize("share", [0.1, 0.3])
def test_groups_that_are_dropped_whatever_their_task_are_no_finding_about_tasks(share: float) -> None:
    groups: dict[tuple[int, str], bool] = {}

    def drop(played: Played, chance: random.Random) -> None:
        if groups.setdefault((played.step, played.task), chance.random() < share) and played.reward is not None:
            played.reason = "stale"

    assert "tasks_dropped" not in {each.kind for each in DiagnosedRun(1, plant=drop).diagnose().findings}
