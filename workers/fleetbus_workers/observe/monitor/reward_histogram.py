"""Histograms of rewards over the training steps, one for each column of steps. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import msgspec

from fleetbus.recording.episodes import EpisodeRow

BINS, COLUMNS = 12, 60


class RewardHistogram(msgspec.Struct, frozen=True, kw_only=True):
    """``counts`` of trained episodes: for each column of ``width`` steps, from step ``first`` to ``last``, one per bin; the
    bins divide ``low`` to ``high`` evenly."""

    first: int = 0
    last: int = 0
    width: int = 1
    low: float = 0.0
    high: float = 1.0
    counts: tuple[tuple[int, ...], ...] = ()


def build_reward_histogram(rows: Iterable[EpisodeRow], trained_in: Mapping[str, int]) -> RewardHistogram:
    """Rewards of the episodes that ``trained_in`` gives a step; at least 0 to 1, at most `COLUMNS` columns."""
    found = [
        (trained_in[row.episode_id], row.reward)
        for row in rows
        if row.reward is not None and math.isfinite(row.reward) and row.episode_id in trained_in
    ]
    if not found:
        return RewardHistogram()
    steps, rewards = zip(*found, strict=True)
    first, last, low, high = min(steps), max(steps), min(0.0, *rewards), max(1.0, *rewards)
    width = (last - first) // COLUMNS + 1
    counts = [[0] * BINS for _ in range((last - first) // width + 1)]
    for step, reward in found:
        share = (reward / 2 - low / 2) / (high / 2 - low / 2)  # halves: the range of any two numbers is finite
        counts[(step - first) // width][min(int(share * BINS), BINS - 1)] += 1
    return RewardHistogram(first=first, last=last, width=width, low=low, high=high, counts=tuple(map(tuple, counts)))
