"""From the fold of a run to samples under their Prometheus names. Pure."""

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

from fleetbus_schemas import GRADED, EngineLoad
from fleetbus_workers.observe.metrics.names import Sample
from fleetbus_workers.observe.run.jetstream import ServerView
from fleetbus_workers.observe.run.run_observer import LogHealth
from fleetbus_workers.observe.run.state import RECENT_EPISODES, RunState
from fleetbus_workers.observe.run.termination import Termination
from fleetbus_workers.observe.run.watchdog import Stall

QUANTILES = (0.1, 0.5, 0.9)
_STAGE = "seconds_"


def collect(
    state: RunState,
    health: LogHealth,
    server: ServerView,
    stalls: Sequence[Stall],
    *,
    now: float,
    now_ns: int,
    ending: Termination | None = None,
) -> list[Sample]:
    """All samples as of now; what is unknown has none. ``ending`` is that of a run that is over."""
    return [
        *_collect_progress(state, now_ns),
        *_collect_step(state),
        *_collect_episodes(state),
        *_collect_workers(state, now),
        *([Sample("fleetbus_over", 1.0, (ending.how,))] if ending is not None else []),
        *(Sample("fleetbus_stalled", 1.0, (where,)) for where in sorted({stall.where for stall in stalls})),
        *_collect_log(health, server),
    ]


def iterate_evaluation_values(
    state: RunState, written: set[tuple[str, str]]
) -> Iterable[tuple[int, float, dict[str, float], str]]:
    """Step, Unix time, results and name of the surviving lineages' evaluations that are not ``written`` yet, and are from now
    on. ``written`` are lineages and names. One without any grade has no results."""
    for point in state.training.evaluations:
        if (point.lineage, point.name) not in written:
            written.add((point.lineage, point.name))
            if point.graded:
                values = {"success": point.success, "mean_reward": point.mean_reward, "graded": float(point.graded)}
                yield point.step, point.time_ns / 1e9, values, point.name


def iterate_step_values(state: RunState, written: set[tuple[str, int]]) -> Iterable[tuple[int, float, dict[str, float]]]:
    """Step, Unix time and metrics of the surviving lineage's steps that are not ``written`` yet, and are from now on.

    ``written`` are lineages and steps: what a later lineage trains again is another step of the same number.
    """
    for point in state.training.steps:
        if (point.lineage, point.step) not in written:
            written.add((point.lineage, point.step))
            yield point.step, point.time_ns / 1e9, point.metrics | {"version": float(point.version)}


def _collect_progress(state: RunState, now_ns: int) -> Iterable[Sample]:
    numbers = state.numbers(now_ns)
    named = {
        "fleetbus_step": "step",
        "fleetbus_policy_version": "version",
        "fleetbus_reward_mean": "reward",
        "fleetbus_episodes_per_second": "episodes_per_second",
        "fleetbus_tokens_per_second": "tokens_per_second",
        "fleetbus_turns_mean": "turns",
        "fleetbus_turns_extending_ratio": "turns_extending",
        "fleetbus_truncated_ratio": "truncated",
        "fleetbus_tool_error_ratio": "tool_error_rate",
        "fleetbus_takeovers_total": "takeovers",
        "fleetbus_malformed_total": "malformed",
        "fleetbus_oldest_open_episode_seconds": "oldest_open_seconds",
        "fleetbus_since_progress_seconds": "since_progress_seconds",
    }
    for name, key in named.items():
        if numbers[key] is not None:
            yield Sample(name, float(numbers[key]))
    for name, key in (("episodes", "outcomes"), ("errors", "errors"), ("excluded", "excluded"), ("segments", "segments")):
        yield from (Sample(f"fleetbus_{name}_total", float(count), (label,)) for label, count in numbers[key].items())
    yield from (Sample("fleetbus_episodes_open", float(numbers[key]), (key,)) for key in ("waiting", "running"))
    for evaluation in state.training.evaluations:
        yield Sample("fleetbus_evaluation_success_ratio", evaluation.success, (evaluation.name,))


def _collect_step(state: RunState) -> Iterable[Sample]:
    points = state.training.steps
    metrics = points[-1].metrics if points else {}
    stages = {name.removeprefix(_STAGE): value for name, value in metrics.items() if name.startswith(_STAGE)}
    for name, value in metrics.items():
        if name.startswith("staleness_"):
            yield Sample("fleetbus_staleness_steps", value, (name.removeprefix("staleness_"),))
        elif not name.startswith(_STAGE):
            yield Sample("fleetbus_train_metric", value, (name,))
    yield from (Sample("fleetbus_stage_seconds", value, (stage,)) for stage, value in stages.items())
    if sum(stages.values()) > 0 and "wait" in stages:
        yield Sample("fleetbus_trainer_idle_ratio", stages["wait"] / sum(stages.values()))
    for name, key in (("fleetbus_success_ratio", "success"), ("fleetbus_groups_without_signal", "groups_without_signal")):
        if key in metrics:
            yield Sample(name, metrics[key])


def _collect_episodes(state: RunState) -> Iterable[Sample]:
    rows = list(state.episodes.rows.values())[-RECENT_EPISODES:]
    rewards: defaultdict[str, list[float]] = defaultdict(list)
    timings: defaultdict[str, list[float]] = defaultdict(list)
    for row in rows:
        if row.outcome in GRADED and row.reward is not None and math.isfinite(row.reward):
            rewards[row.env].append(row.reward)
        for stage, seconds in row.timings.items():
            timings[stage].append(seconds)
    for env, values in rewards.items():
        values.sort()
        for quantile in QUANTILES:
            value = values[min(int(quantile * len(values)), len(values) - 1)]
            yield Sample("fleetbus_reward_quantile", value, (env, f"{quantile:g}"))
    yield from (
        Sample("fleetbus_episode_stage_seconds", statistics.fmean(values), (stage,)) for stage, values in timings.items()
    )


def _collect_workers(state: RunState, now: float) -> Iterable[Sample]:
    rows = state.worker_registry.rows(now)
    for (role, condition), count in Counter((row.role, row.state) for row in rows).items():
        yield Sample("fleetbus_workers", float(count), (role, condition))
    for row in rows:
        labels = (row.worker, row.role)
        yield Sample("fleetbus_worker_slots", float(row.slots), labels)
        yield Sample("fleetbus_worker_in_flight", float(row.in_flight), labels)
        yield Sample("fleetbus_worker_silent_seconds", row.seconds, labels)
        if row.policy_version >= 0:
            yield Sample("fleetbus_worker_version", float(row.policy_version), labels)
    for beat in state.worker_registry.list_heartbeats():
        for name, value in beat.counters.items():
            yield Sample("fleetbus_worker_counter_total", value, (beat.worker, beat.role, name))
        if beat.engine is not None:
            yield from _collect_engine(beat.worker, beat.engine)


def _collect_engine(worker: str, engine: EngineLoad) -> Iterable[Sample]:
    values = (
        ("fleetbus_engine_requests", engine.running, (worker, "running")),
        ("fleetbus_engine_requests", engine.waiting, (worker, "waiting")),
        ("fleetbus_engine_kv_cache_ratio", engine.kv_cache_use, (worker,)),
        ("fleetbus_engine_tokens_per_second", engine.tokens_per_second, (worker,)),
        ("fleetbus_engine_prefix_hit_ratio", engine.prefix_hits, (worker,)),
        ("fleetbus_engine_preemptions_total", engine.preemptions, (worker,)),
    )
    yield from (Sample(name, float(value), labels) for name, value, labels in values if value is not None)


def _collect_log(health: LogHealth, server: ServerView) -> Iterable[Sample]:
    yield Sample("fleetbus_log_bytes", float(health.bytes))
    yield Sample("fleetbus_log_limit_bytes", float(health.limit_bytes))
    yield Sample("fleetbus_log_entries_per_second", health.entries_per_second)
    for each in server.consumers:
        yield Sample("fleetbus_log_pending", float(each.pending), (each.kind,))
        yield Sample("fleetbus_log_unacked", float(each.unacked), (each.kind,))
        yield Sample("fleetbus_log_redelivered", float(each.redelivered), (each.kind,))
    if server.connections is not None:
        yield Sample("fleetbus_nats_connections", float(server.connections))
    if server.slow_consumers is not None:
        yield Sample("fleetbus_nats_slow_consumers", float(server.slow_consumers))
    unread: Counter[str] = Counter()
    for client in server.clients:
        unread[client.worker] += client.pending_bytes
    yield from (Sample("fleetbus_nats_pending_bytes", float(count), (worker,)) for worker, count in unread.items())
    yield from (Sample("fleetbus_nats_stream_bytes", float(each.bytes), (each.name,)) for each in server.streams)
