"""Rewards by training step: which episodes count, and into which column and bin."""

from __future__ import annotations

import math

from fleetbus.recording.episodes import EpisodeRow
from fleetbus_workers.observe.monitor.reward_histogram import BINS, COLUMNS, RewardHistogram, build_reward_histogram


def rows(*rewards: float | None) -> list[EpisodeRow]:
    return [EpisodeRow(episode_id=f"e{index}", reward=reward) for index, reward in enumerate(rewards)]


def test_an_episode_counts_in_the_step_that_trained_it() -> None:
    found = build_reward_histogram(rows(0.0, 1.0, 1.0, 0.5), {"e0": 3, "e1": 3, "e2": 4, "e3": 5})
    assert (found.first, found.last, found.width, found.low, found.high) == (3, 5, 1, 0.0, 1.0)
    assert [(sum(column), column[0], column[BINS // 2], column[-1]) for column in found.counts] == [
        (2, 1, 0, 1),
        (1, 0, 0, 1),
        (1, 0, 1, 0),
    ]


def test_what_has_no_grade_or_was_not_trained_does_not_count() -> None:
    assert build_reward_histogram([], {}) == RewardHistogram()
    assert build_reward_histogram(rows(None, 1.0, math.nan, math.inf), {"e0": 1, "e2": 1, "e3": 1}) == RewardHistogram()


def test_a_long_run_has_columns_of_many_steps_and_every_reward_has_a_bin() -> None:
    steps = 10_000
    rewards = [-1.7e308, 1.7e308, *([0.25] * (steps - 2))]
    found = build_reward_histogram(rows(*rewards), {f"e{index}": index + 1 for index in range(steps)})
    assert len(found.counts) <= COLUMNS and found.width == math.ceil(steps / COLUMNS)
    assert sum(map(sum, found.counts)) == steps
    assert (found.counts[0][0], found.counts[0][-1]) == (1, 1)
