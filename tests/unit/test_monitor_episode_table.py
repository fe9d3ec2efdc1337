"""The page's table of episodes: what is chosen, in which order, who is beside whom, and what a spreadsheet gets."""

from __future__ import annotations

import csv
import io
from typing import Any

import pytest

from fleetbus.recording.episodes import EpisodeRow
from fleetbus_workers.observe.monitor.episode_table import build_csv, choose_rows, find_neighbours, group_siblings


def row(name: str, **facts: Any) -> EpisodeRow:
    return EpisodeRow(episode_id=name, **{"group_id": "g", "task_key": "t", "outcome": "completed"} | facts)


ROWS = [
    row("a", reward=0.5, turns=3, policy_versions=(3, 4)),
    row("b", reward=None, turns=1),
    row("c", reward=1.0, turns=2, task_key="=1+1"),
]


def names(**query: str) -> list[str]:
    return [each.episode_id for each in choose_rows(ROWS, lambda each: each.outcome or "open", query)]


@pytest.mark.parametrize(
    ("query", "found"),
    [
        ({}, ["c", "b", "a"]),
        ({"sort": "reward"}, ["a", "c", "b"]),
        ({"min_reward": "0.6"}, ["c"]),
        ({"max_reward": "0.5"}, ["a"]),
        ({"min_reward": "0.5", "max_reward": "1"}, ["c", "a"]),
        ({"min_reward": "much", "version": ""}, ["c", "b", "a"]),
        ({"version": "4"}, ["a"]),
        ({"sort": "-reward"}, ["c", "a", "b"]),
        ({"sort": "turns"}, ["b", "c", "a"]),
        ({"sort": "nonsense"}, ["c", "b", "a"]),
        ({"text": "=1"}, ["c"]),
        ({"state": "lost"}, []),
        ({"group": "g", "sort": "episode_id"}, ["a", "b", "c"]),
    ],
)
def test_rows_are_filtered_and_sorted_with_what_has_no_value_last(query: dict[str, str], found: list[str]) -> None:
    assert names(**query) == found


def test_an_episode_has_those_before_and_after_it_and_the_samples_of_its_task_in_its_group() -> None:
    rows = {each.episode_id: each for each in [*ROWS, row("d", group_id="")]}
    assert find_neighbours(rows, "b") == {"previous": "a", "next": "c", "siblings": ["a"]}
    assert find_neighbours(rows, "d") == {"previous": "c", "next": None, "siblings": []}
    assert find_neighbours(rows, "nobody") == {"previous": None, "next": None, "siblings": []}


def test_siblings_that_are_found_for_all_at_once_are_those_of_each() -> None:
    rows = {each.episode_id: each for each in [*ROWS, row("d", group_id=""), row("e", group_id=""), row("f"), row("g")]}
    found = group_siblings(rows)
    assert found.keys() == rows.keys()
    for name in rows:
        assert find_neighbours(found[name], name)["siblings"] == find_neighbours(rows, name)["siblings"]
    assert list(found["d"]) == ["d"] and list(found["f"]) == ["a", "b", "f", "g"]


def test_no_cell_of_the_file_is_calculated_by_a_spreadsheet() -> None:
    read = list(csv.DictReader(io.StringIO(build_csv(ROWS, lambda each: "completed"))))
    assert [each["episode_id"] for each in read] == ["a", "b", "c"]
    assert read[2]["task_key"] == "'=1+1" and read[0]["reward"] == "0.5" and read[1]["reward"] == ""
