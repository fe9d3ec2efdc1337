"""Success by environment or by task, with the use of tools: what the page shows of which tasks are learned. Pure."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping

import msgspec

from fleetbus.core.algorithms.means import compute_mean
from fleetbus.recording.episodes import EpisodeRow

SORTABLE = ("name", "episodes", "graded", "mean", "success", "tool_calls", "tool_errors")


class SuccessRow(msgspec.Struct, frozen=True, kw_only=True):
    """The episodes of one environment or task. ``mean`` reward and ``success`` are of the ``graded`` ones, None without any;
    ``tool_calls`` per episode that ended, ``tool_errors`` the share of calls that failed."""

    name: str
    env: str
    episodes: int
    graded: int
    mean: float | None
    success: float | None
    tool_calls: float
    tool_errors: float | None


def build_success_table(rows: Iterable[EpisodeRow], query: Mapping[str, str], *, threshold: float) -> list[SuccessRow]:
    """One row per ``by`` (``env``, else the task) of the ``split``, by ``sort``: a name of `SORTABLE`, with ``-`` before it
    from the largest on; otherwise least success first."""
    is_by_environment, split = query.get("by") == "env", query.get("split")
    found: defaultdict[str, list[EpisodeRow]] = defaultdict(list)
    for row in rows:
        if not split or row.split == split:
            found[(row.env or "(none)") if is_by_environment else row.task_key].append(row)
    table = [_build_row(name, found[name], threshold) for name in sorted(found)]
    wanted = query.get("sort", "")
    name = wanted.removeprefix("-")
    key = name if name in SORTABLE else "success"
    known = [row for row in table if getattr(row, key) is not None]
    known.sort(key=lambda row: getattr(row, key), reverse=wanted.startswith("-"))
    return known + [row for row in table if getattr(row, key) is None]


def _build_row(name: str, rows: list[EpisodeRow], threshold: float) -> SuccessRow:
    rewards = [row.reward for row in rows if row.reward is not None and math.isfinite(row.reward)]
    ended = [row for row in rows if row.outcome]
    calls = sum(row.tool_calls for row in ended)
    return SuccessRow(
        name=name,
        env=rows[0].env,
        episodes=len(rows),
        graded=len(rewards),
        mean=compute_mean(rewards),
        success=sum(reward >= threshold for reward in rewards) / len(rewards) if rewards else None,
        tool_calls=calls / len(ended) if ended else 0.0,
        tool_errors=sum(row.tool_errors for row in ended) / calls if calls else None,
    )
