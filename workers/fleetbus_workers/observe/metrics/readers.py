"""Readers of metrics that have several values or take more than an expression. Pure."""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping

from fleetbus_schemas import GRADED
from fleetbus_workers.observe.metrics.run_view import RunView
from fleetbus_workers.observe.run.formatting import STAGE_PREFIX, STALENESS_PREFIX
from fleetbus_workers.observe.run.policies import PolicyRow
from fleetbus_workers.observe.run.worker_registry import WorkerRow

QUANTILES = (0.1, 0.5, 0.9)

Labelled = Mapping[tuple[str, ...], float]


def read_turns_extending(view: RunView) -> float | None:
    """None while every episode is one segment."""
    state = view.state
    return 1 - state.prompts / state.turns if state.segments and state.turns > 0 else None


def read_tool_error_rate(view: RunView) -> float | None:
    """None while nobody calls a tool."""
    calls = sum(row.tool_calls for row in view.recent)
    return sum(row.tool_errors for row in view.recent) / calls if calls else None


def read_since_progress(view: RunView) -> float | None:
    """None before the first result."""
    last = view.state.last_progress_ns
    return (view.now_ns - last) / 1e9 if last else None


def read_reward_quantiles(view: RunView) -> Labelled:
    """By environment and quantile."""
    rewards: defaultdict[str, list[float]] = defaultdict(list)
    for row in view.recent:
        if row.outcome in GRADED and row.reward is not None and math.isfinite(row.reward):
            rewards[row.env].append(row.reward)
    return {
        (env, f"{quantile:g}"): sorted(values)[min(int(quantile * len(values)), len(values) - 1)]
        for env, values in rewards.items()
        for quantile in QUANTILES
    }


def read_episode_stages(view: RunView) -> Mapping[str, float]:
    """Means by stage."""
    timings: defaultdict[str, list[float]] = defaultdict(list)
    for row in view.recent:
        for stage, seconds in row.timings.items():
            timings[stage].append(seconds)
    return {stage: statistics.fmean(values) for stage, values in timings.items()}


def read_step_prefixed(prefix: str) -> Callable[[RunView], Mapping[str, float]]:
    """The metrics of the last step whose names begin with ``prefix``, under the rest of their names."""
    return lambda view: {name.removeprefix(prefix): value for name, value in view.step.items() if name.startswith(prefix)}


def read_step_others(view: RunView) -> Mapping[str, float]:
    """The other metrics of the last step."""
    return {name: value for name, value in view.step.items() if not name.startswith((STAGE_PREFIX, STALENESS_PREFIX))}


def read_trainer_idle(view: RunView) -> float | None:
    """None where the last step does not say how long it waited."""
    stages = read_step_prefixed(STAGE_PREFIX)(view)
    whole = sum(stages.values())
    return stages["wait"] / whole if whole > 0 and "wait" in stages else None


def read_worker_states(view: RunView) -> Labelled:
    """Counts by role and state."""
    return Counter((row.role, row.state) for row in view.workers)


def read_pools(*fields: str) -> Callable[[RunView], Labelled]:
    """Fields of `PoolRow` of each pool, by pool and field."""
    return lambda view: {(row.pool, field): getattr(row, field) for row in view.pools for field in fields}


def read_workers(read: Callable[[WorkerRow], float | None]) -> Callable[[RunView], Labelled]:
    """One value of each worker that has it."""
    return lambda view: {(row.worker, row.role): value for row in view.workers if (value := read(row)) is not None}


def read_worker_counters(view: RunView) -> Labelled:
    """The counters of heartbeats, by worker, role and name."""
    beats = view.state.worker_registry.list_heartbeats()
    return {(beat.worker, beat.role, name): value for beat in beats for name, value in beat.counters.items()}


def read_engines(field: str, *labels: str) -> Callable[[RunView], Labelled]:
    """A field of `EngineLoad` of each worker whose engine tells it; ``labels`` follow the worker's name."""

    def read(view: RunView) -> Labelled:
        beats = [beat for beat in view.state.worker_registry.list_heartbeats() if beat.engine is not None]
        values = {(beat.worker, *labels): getattr(beat.engine, field) for beat in beats}
        return {key: value for key, value in values.items() if value is not None}

    return read


def read_seat_policies(read: Callable[[PolicyRow], float | None]) -> Callable[[RunView], Labelled]:
    """A number of each policy beside the run's own that has it."""

    def read_all(view: RunView) -> Labelled:
        values = {(row.policy,): read(row) for row in view.seat_policies}
        return {key: value for key, value in values.items() if value is not None}

    return read_all


def read_consumers(field: str) -> Callable[[RunView], Mapping[str, float]]:
    """A field of `ConsumerPending` by what the consumers read."""
    return lambda view: {each.kind: getattr(each, field) for each in view.server.consumers}


def read_unread_bytes(view: RunView) -> Mapping[str, float]:
    """Summed over the connections of a worker."""
    unread: Counter[str] = Counter()
    for client in view.server.clients:
        unread[client.worker] += client.pending_bytes
    return unread
