"""Every metric that fleetbus exports: its Prometheus name, kind and meaning. Names are never changed, only added.

Units stand last (``_seconds``, ``_bytes``, ``_ratio``); counters end in ``_total`` and only grow while the exporter lives.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec


class Metric(msgspec.Struct, frozen=True):
    """``labels`` are the names of its labels, besides ``run``, which all have."""

    kind: Literal["gauge", "counter"]
    help: str
    labels: tuple[str, ...] = ()


class Sample(msgspec.Struct, frozen=True):
    """One value of a metric; ``labels`` in the order of `Metric.labels`."""

    name: str
    value: float
    labels: tuple[str, ...] = ()


METRICS: Mapping[str, Metric] = {
    # Progress
    "fleetbus_step": Metric("gauge", "Training steps done"),
    "fleetbus_policy_version": Metric("gauge", "Newest published version of the policy"),
    "fleetbus_reward_mean": Metric("gauge", "Mean reward of recent graded episodes"),
    "fleetbus_reward_quantile": Metric("gauge", "Reward of recent graded episodes at a quantile, by environment", ("env", "q")),
    "fleetbus_success_ratio": Metric("gauge", "Share of successes in the last batch: as environments say, or reward 1 or more"),
    "fleetbus_groups_without_signal": Metric("gauge", "Groups of the last batch whose rewards are all equal"),
    "fleetbus_evaluation_success_ratio": Metric("gauge", "Share of successes among graded held-out episodes", ("name",)),
    "fleetbus_episodes_total": Metric("counter", "Finished episodes by outcome", ("outcome",)),
    "fleetbus_episodes_per_second": Metric("gauge", "Finished episodes per second"),
    "fleetbus_tokens_per_second": Metric("gauge", "Tokens of finished episodes per second"),
    "fleetbus_turns_mean": Metric("gauge", "Turns of recent graded episodes"),
    "fleetbus_truncated_ratio": Metric("gauge", "Share of recent graded episodes that ran out of turns or tokens"),
    # Errors
    "fleetbus_errors_total": Metric("counter", "Episodes that ended in an error, by class", ("error_class",)),
    "fleetbus_excluded_total": Metric("counter", "Episodes settled without being trained, by reason", ("reason",)),
    "fleetbus_segments_total": Metric("counter", "Segments that episodes began beside their first, by reason", ("reason",)),
    "fleetbus_turns_extending_ratio": Metric("gauge", "Share of turns that continued an earlier context, once one did not"),
    "fleetbus_tool_error_ratio": Metric("gauge", "Share of recent tool calls that failed"),
    "fleetbus_takeovers_total": Metric("counter", "Attempts that took an episode over from a lost worker"),
    "fleetbus_malformed_total": Metric("counter", "Malformed entries of the log"),
    # Learner: what StepTrained carries, staleness, stability and time per stage among it
    "fleetbus_train_metric": Metric("gauge", "A metric of the last training step", ("name",)),
    "fleetbus_staleness_steps": Metric("gauge", "Steps between sampling and training in the last batch", ("statistic",)),
    "fleetbus_stage_seconds": Metric(
        "gauge", "Seconds of a stage of the last step; wait is high when rollouts bound", ("stage",)
    ),
    "fleetbus_trainer_idle_ratio": Metric("gauge", "Share of the last step that the learner waited for episodes"),
    "fleetbus_episode_stage_seconds": Metric("gauge", "Mean seconds of a stage in recent episodes", ("stage",)),
    # Orchestration
    "fleetbus_episodes_open": Metric("gauge", "Episodes without a result", ("state",)),
    "fleetbus_oldest_open_episode_seconds": Metric("gauge", "Age of the oldest episode without a result"),
    "fleetbus_since_progress_seconds": Metric("gauge", "Time since an episode ended or a step was trained"),
    "fleetbus_stalled": Metric("gauge", "1 while nothing progresses or is learned, by where it is stuck", ("where",)),
    "fleetbus_over": Metric("gauge", "1 once the run is over, by how it ended", ("how",)),
    "fleetbus_workers": Metric("gauge", "Workers by role and state", ("role", "state")),
    "fleetbus_worker_slots": Metric("gauge", "Slots of a worker", ("worker", "role")),
    "fleetbus_worker_in_flight": Metric("gauge", "Slots in use", ("worker", "role")),
    "fleetbus_worker_version": Metric("gauge", "Policy version that a worker has", ("worker", "role")),
    "fleetbus_worker_silent_seconds": Metric("gauge", "Time since a worker's last sign of life", ("worker", "role")),
    "fleetbus_worker_counter_total": Metric("counter", "What a worker counts in its heartbeat", ("worker", "role", "name")),
    # Engines of inference workers, as far as they tell
    "fleetbus_engine_requests": Metric("gauge", "Requests that an engine computes or keeps waiting", ("worker", "state")),
    "fleetbus_engine_kv_cache_ratio": Metric("gauge", "Share of an engine's KV cache in use", ("worker",)),
    "fleetbus_engine_tokens_per_second": Metric("gauge", "Tokens that an engine sampled for a worker per second", ("worker",)),
    "fleetbus_engine_prefix_hit_ratio": Metric(
        "gauge", "Share of prompt tokens that an engine found in its cache", ("worker",)
    ),
    "fleetbus_engine_preemptions_total": Metric("counter", "Requests that an engine dropped and computed again", ("worker",)),
    # The log
    "fleetbus_log_bytes": Metric("gauge", "Bytes stored in the log"),
    "fleetbus_log_limit_bytes": Metric("gauge", "Limit of the log, 0 for none"),
    "fleetbus_log_entries_per_second": Metric("gauge", "Entries stored per second"),
    "fleetbus_log_pending": Metric("gauge", "Entries that consumers have not delivered yet", ("kind",)),
    "fleetbus_log_unacked": Metric("gauge", "Entries delivered and not acked", ("kind",)),
    "fleetbus_log_redelivered": Metric("gauge", "Un-acked entries that were delivered more than once", ("kind",)),
    "fleetbus_nats_connections": Metric("gauge", "Connections of the NATS server"),
    "fleetbus_nats_slow_consumers": Metric("gauge", "Clients that the NATS server has cut off for being slow"),
    "fleetbus_nats_pending_bytes": Metric("gauge", "Bytes written for a client of NATS and not taken by it yet", ("worker",)),
    "fleetbus_nats_stream_bytes": Metric("gauge", "Bytes of a stream of the run", ("stream",)),
}
