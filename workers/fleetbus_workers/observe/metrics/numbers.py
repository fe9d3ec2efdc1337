"""The numbers of a run under short names, as the page and `top --json` show them. Pure."""

from __future__ import annotations

from typing import Any

from fleetbus_workers.observe.metrics.run_view import RunView
from fleetbus_workers.observe.metrics.table import METRICS

SHOWN_FAILURES = 5
"""Kinds of failure, the most frequent ones first."""


def build_numbers(view: RunView) -> dict[str, Any]:
    """Every metric of the run with a key, and what is shown beside them."""
    state, progress = view.state, view.state.progress
    failures = sorted(state.episodes.failures.kinds, key=lambda kind: -kind.count)[:SHOWN_FAILURES]
    return {metric.key: metric.read(view) for metric in METRICS if metric.key and metric.page != "engine"} | {
        "steps": max(progress.steps, progress.step),
        "finished": state.training.is_finished,
        "checkpoint": state.checkpoint,
        "requested": state.requested,
        "finished_episodes": progress.episodes,
        "waiting": view.open.waiting,
        "running": view.open.running,
        "stuck_seconds": state.compute_stuck_seconds(view.now_ns, view.open.oldest_ns),
        "quiet_seconds": view.quiet_seconds,
        "failures": [{"line": kind.line, "episode_id": kind.episode_id, "traceback": kind.traceback} for kind in failures],
    }
