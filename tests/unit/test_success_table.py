"""Success by environment and by task, as the page shows it."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from fleetbus.recording.episodes import EpisodeRow
from fleetbus_workers.observe.monitor.success_table import build_success_table

ROWS = [
    EpisodeRow(episode_id="a", task_key="easy", env="shop", reward=1.0, outcome="completed", tool_calls=3, tool_errors=1),
    EpisodeRow(episode_id="b", task_key="easy", env="shop", reward=0.5, outcome="completed", tool_calls=1),
    EpisodeRow(episode_id="c", task_key="hard", env="shop", reward=0.0, outcome="truncated", split="eval"),
    EpisodeRow(episode_id="d", task_key="odd", reward=float("nan"), outcome="env_failed"),
    EpisodeRow(episode_id="e", task_key="odd"),
]


def names(**query: str) -> list[str]:
    return [row.name for row in build_success_table(ROWS, query, threshold=1.0)]


def test_each_task_has_its_success_its_mean_reward_and_its_use_of_tools() -> None:
    rows = {row.name: row for row in build_success_table(ROWS, {}, threshold=1.0)}
    assert msgspec.structs.asdict(rows["easy"]) == {
        "name": "easy", "env": "shop", "episodes": 2, "graded": 2, "mean": 0.75, "success": 0.5, "tool_calls": 2.0,
        "tool_errors": 0.25,
    }  # fmt: skip
    odd = rows["odd"]
    assert (odd.episodes, odd.graded, odd.mean, odd.success, odd.tool_calls, odd.tool_errors) == (2, 0, None, None, 0.0, None)
    assert build_success_table(ROWS, {}, threshold=0.5)[1].success == 1.0


def test_environments_are_counted_over_all_their_tasks() -> None:
    found = {row.name: (row.episodes, row.success) for row in build_success_table(ROWS, {"by": "env"}, threshold=1.0)}
    assert found == {"shop": (3, pytest.approx(1 / 3)), "(none)": (2, None)}


@pytest.mark.parametrize(
    ("query", "found"),
    [
        ({}, ["hard", "easy", "odd"]),
        ({"sort": "-success"}, ["easy", "hard", "odd"]),
        ({"sort": "name"}, ["easy", "hard", "odd"]),
        ({"sort": "-episodes"}, ["easy", "odd", "hard"]),
        ({"sort": "no such name"}, ["hard", "easy", "odd"]),
        ({"split": "eval"}, ["hard"]),
    ],
)
def test_the_least_success_comes_first_and_columns_sort(query: dict[str, Any], found: list[str]) -> None:
    assert names(**query) == found
