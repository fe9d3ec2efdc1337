"""A run as the page shows it: its first view, its curves, the rows of its lists, one episode. Pure, of the fold and entries.

Used by the routes of the live page and by the static copy of it, which so cannot differ.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import msgspec

from fleetbus.bus.base import StreamEntry
from fleetbus.recording.episodes import EpisodeRow
from fleetbus.recording.token_record import TrainedTokens
from fleetbus_workers.observe.metrics.numbers import build_numbers
from fleetbus_workers.observe.metrics.run_view import RunView
from fleetbus_workers.observe.metrics.table import METRICS
from fleetbus_workers.observe.monitor.episode_table import describe_neighbours
from fleetbus_workers.observe.monitor.episode_view import describe_episode
from fleetbus_workers.observe.monitor.token_decoder import TokenDecoder
from fleetbus_workers.observe.run.state import RunState
from fleetbus_workers.observe.run.training_history import TrainingHistory

_CARDS = [metric.describe_card() for metric in METRICS if metric.page]

EVERYTHING: Mapping[str, int] = MappingProxyType({})

_LOG_FACTS = ("bytes", "limit_bytes", "last_sequence", "followed", "counted_from", "older_read")


def describe_overview(view: RunView, *, run: str, is_behind: bool, has_actions: bool) -> dict[str, Any]:
    """The first view, without ``stalls`` and ``notes``."""
    health = view.health
    usage = {name: getattr(health, name) for name in _LOG_FACTS}
    return {
        "run": run,
        "ending": view.termination,
        "actions": has_actions,
        "paused": view.state.worker_registry.is_paused,
        "metrics": _CARDS,
        "numbers": build_numbers(view),
        "workers": view.workers,
        "log": usage | {"entries_per_second": health.entries_per_second, "problem": health.problem, "is_behind": is_behind},
        "operations": [{**msgspec.structs.asdict(each), "line": each.line} for each in view.state.operations.newest],
        "league": view.state.league.rows,
        "server": view.server,
        "stalls": [],
        "notes": [],
    }


def count_points(state: RunState) -> dict[str, int]:
    """The points of the curves of each trained policy, by its name."""
    return {name: len(history.steps) for name, history in _list_trainings(state).items()}


def describe_curves(state: RunState, starts: Mapping[str, int] = EVERYTHING) -> dict[str, Any]:
    """Points of each trained policy from the number in ``starts`` on, those of the run's own outside of ``others``; all
    evaluations, which are few."""

    def describe(policy: str, history: TrainingHistory) -> dict[str, Any]:
        start = starts.get(policy, 0)
        return {"start": start, "points": history.steps[start:]}

    own, *others = _list_trainings(state).items()
    shown = {"policy": state.policy, "others": {policy: describe(policy, history) for policy, history in others}}
    return describe(*own) | shown | {"evaluations": state.training.evaluations}


def _list_trainings(state: RunState) -> dict[str, TrainingHistory]:
    """That of the run's own policy is the first."""
    return {state.policy: state.training} | state.others


def describe_row(state: RunState, row: EpisodeRow) -> dict[str, Any]:
    """A row of the list of episodes."""
    about = {"state": state.describe_state(row), "trained_in": state.trained_in.get(row.episode_id, 0)}
    return {**msgspec.structs.asdict(row), **about}


def describe_whole_episode(
    state: RunState,
    episode: str,
    entries: Sequence[StreamEntry],
    words: TokenDecoder,
    trained: TrainedTokens | None,
    beside: Mapping[str, EpisodeRow] | None = None,
) -> dict[str, Any]:
    """One episode with its transcript, from its ``entries`` in log order, and its place in the run, or among those ``beside``
    it."""
    row = state.episodes.rows.get(episode)
    return {
        "episode": episode,
        "actions": False,
        "row": row and describe_row(state, row),
        "trained_in": state.trained_in.get(episode, 0),
        **describe_neighbours(state.episodes.rows if beside is None else beside, episode),
        **describe_episode(entries, words, trained),
    }
