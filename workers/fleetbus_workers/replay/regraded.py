"""Verdicts on recorded episodes beside those of then: one row for each that differs, and counts."""

from __future__ import annotations

from collections import Counter
from typing import Literal

import msgspec

Use = Literal["trained", "held out", "not trained"]

TOLERANCE = 1e-6
"""Rewards that differ by less are the same."""

MAX_REASONS = 20
"""Different reasons for which there is no verdict that are kept."""


class Flip(msgspec.Struct, frozen=True, kw_only=True):
    """An episode whose reward would be another. ``old`` is None where there was no verdict then. ``crosses``: one of them is a
    success and the other is not."""

    episode_id: str
    task_key: str
    use: Use
    old: float | None
    new: float
    crosses: bool


class Regrading(msgspec.Struct, frozen=True, kw_only=True):
    """``episodes`` with a transcript were graded again: ``same`` of them as before, ``flips`` otherwise, ``without_verdict``
    not, by reason. ``skipped`` had ended without anything to grade, or have no new verifier. ``mean_old`` and ``mean_new`` are
    mean rewards over those that have both."""

    episodes: int
    same: int
    flips: tuple[Flip, ...]
    flips_by_use: dict[str, int]
    without_verdict: int
    reasons: dict[str, int]
    skipped: int
    mean_old: float | None
    mean_new: float | None


class RegradingFold:
    """Gathers verdicts in any order; ``success`` is the reward from which on an episode is a success."""

    def __init__(self, success: float) -> None:
        self._success = success
        self._flips: list[Flip] = []
        self._same = self._without = self.skipped = 0
        self._reasons: Counter[str] = Counter()
        self._pairs: list[tuple[float, float]] = []

    def add(self, episode_id: str, task_key: str, use: Use, old: float | None, new: float | None, reason: str) -> None:
        """Note the new verdict of an episode."""
        if new is None:
            self._without += 1
            if reason in self._reasons or len(self._reasons) < MAX_REASONS:
                self._reasons[reason] += 1
            return
        if old is not None:
            self._pairs.append((old, new))
            if abs(old - new) < TOLERANCE:
                self._same += 1
                return
        crosses = ((old or 0.0) >= self._success) is not (new >= self._success)
        flip = Flip(episode_id=episode_id, task_key=task_key, use=use, old=old, new=new, crosses=crosses)
        self._flips.append(flip)

    def build(self) -> Regrading:
        """All that was noted, flips by episode."""
        count = len(self._pairs)
        means = [sum(pair[place] for pair in self._pairs) / count for place in (0, 1)] if count else [None, None]
        return Regrading(
            episodes=self._same + len(self._flips) + self._without,
            same=self._same,
            flips=tuple(sorted(self._flips, key=lambda flip: flip.episode_id)),
            flips_by_use=dict(Counter(flip.use for flip in self._flips)),
            without_verdict=self._without,
            reasons=dict(self._reasons.most_common()),
            skipped=self.skipped,
            mean_old=means[0],
            mean_new=means[1],
        )
