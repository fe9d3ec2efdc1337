"""The draw of an opponent from the last versions of a policy. Pure: seed, group, versions and standings decide.

``win_rate`` is prioritised fictitious self-play (Vinyals et al., Nature 2019: ``f_hard``): a version is drawn in proportion to
``(1 - p) ** 2``, where ``p`` is how often the policy wins against it: ``(wins + draws / 2 + 1) / (games + 2)``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Literal

from fleetbus.config.league import League
from fleetbus.core.training.standings import Score

HARDNESS = 2


def select_pool(league: League, steps: Mapping[int, int], newest: int) -> list[int]:
    """The versions that opponents may be while ``newest`` is that, ascending: the last ``league.size`` of its window, of which
    ``steps`` has the step. Those of one step are equal, and the last of them stands for all. Never empty."""
    window = range(newest - league.window + 1, newest + 1)
    of_step = {steps[version]: version for version in window if version in steps}
    return sorted(of_step.values())[-league.size :] or [newest]


def draw_opponent(
    rule: Literal["newest", "uniform", "win_rate"],
    pool: Sequence[int],
    *,
    against: Mapping[int, Score],
    seed: int,
    group_id: str,
    seat: str,
) -> int:
    """One of the ``pool``, ascending and not empty, for ``seat`` in all episodes of a group. ``against`` are the policy's games
    by opponent."""
    if rule == "newest" or len(pool) == 1:
        return pool[-1]
    weights = [compute_weight(against.get(version, Score())) if rule == "win_rate" else 1.0 for version in pool]
    digest = hashlib.blake2b(f"{seed}/opponent/{seat}/{group_id}".encode(), digest_size=7).digest()
    drawn = int.from_bytes(digest, "little") / (1 << 56) * sum(weights)
    return next((version for version, up_to in zip(pool, accumulate(weights), strict=True) if drawn < up_to), pool[-1])


def compute_weight(score: Score) -> float:
    """The weight of an opponent in a draw, by the policy's games against it."""
    return (1.0 - (score.points + 1) / (score.games + 2)) ** HARDNESS
