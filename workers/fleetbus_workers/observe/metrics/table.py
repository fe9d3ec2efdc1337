"""Every metric of a run, one row each: the exporter, the page, `top` and the dashboard for Grafana are read from here.

A new one is a row, and what it counts in `observe.run.state` if that is new; `just golden` writes the dashboard.
"""

from __future__ import annotations

import statistics

from fleetbus.core.algorithms.means import compute_mean
from fleetbus_workers.observe.metrics.metric import Metric
from fleetbus_workers.observe.metrics.readers import (
    read_consumers,
    read_engines,
    read_episode_stages,
    read_pools,
    read_reward_quantiles,
    read_seat_policies,
    read_since_progress,
    read_step_others,
    read_step_prefixed,
    read_tool_error_rate,
    read_trainer_idle,
    read_turns_extending,
    read_unread_bytes,
    read_worker_counters,
    read_worker_states,
    read_workers,
)
from fleetbus_workers.observe.run.formatting import STAGE_PREFIX, STALENESS_PREFIX

SHOWN_ERRORS = 12
"""Classes of errors, the most frequent ones first."""

PROGRESS = (
    Metric(
        name="fleetbus_step", help="Training steps done", read=lambda view: view.state.progress.step,
        key="step", panel="Progress: Step and policy version",
    ),
    Metric(
        name="fleetbus_policy_version", help="Newest published version of the policy",
        read=lambda view: view.state.progress.version, panel="Progress: Step and policy version",
        key="version", page="run", title="policy version", top="headline", text="version {:d}",
    ),
    Metric(
        name="fleetbus_reward_mean", help="Mean reward of recent graded episodes",
        read=lambda view: compute_mean(row.reward for row in view.graded if row.reward is not None), panel="Progress: Reward",
        key="reward", page="run", title="reward, last 500", digits=2, top="learning", text="reward {:.3f}",
    ),
    Metric(
        name="fleetbus_reward_quantile", help="Reward of recent graded episodes at a quantile, by environment",
        labels=("env", "q"), read=read_reward_quantiles, panel="Progress: Reward by environment (p10, p50, p90)",
    ),
    Metric(
        name="fleetbus_success_ratio", help="Share of successes in the last batch: as environments say, or reward 1 or more",
        unit="ratio", read=lambda view: view.step.get("success"), panel="Progress: Success of the last batch and held out",
        key="success", top="learning", text="success {:.2f}",
    ),
    Metric(
        name="fleetbus_evaluation_success_ratio", help="Share of successes among graded held-out episodes", unit="ratio",
        labels=("name",), read=lambda view: {each.name: each.success for each in view.state.training.evaluations},
        panel="Progress: Success of the last batch and held out",
    ),
    Metric(
        name="fleetbus_episodes_total", help="Finished episodes by outcome", kind="counter", labels=("outcome",),
        read=lambda view: dict(view.state.progress.outcomes), key="outcomes", panel="Errors: Outcomes per minute",
    ),
    Metric(
        name="fleetbus_episodes_per_second", help="Finished episodes per second", unit="1/s", read=lambda view: view.rates[0],
        key="episodes_per_second", page="run", title="episodes/s", digits=1, top="headline", text="{:.1f} episodes/s",
        panel="Throughput: Episodes per second",
    ),
    Metric(
        name="fleetbus_tokens_per_second", help="Tokens of finished episodes per second", unit="1/s",
        read=lambda view: view.rates[1],
        key="tokens_per_second", page="run", title="tokens/s", top="headline", text="{} tokens/s",
        panel="Throughput: Tokens per second",
    ),
    Metric(
        name="fleetbus_turns_mean", help="Turns of recent graded episodes",
        read=lambda view: statistics.fmean(row.turns for row in view.graded) if view.graded else None,
        key="turns", page="run", title="turns per episode", digits=1, panel="Progress: Turns",
    ),
    Metric(
        name="fleetbus_truncated_ratio", help="Share of recent graded episodes that ran out of turns or tokens", unit="ratio",
        read=lambda view: (
            sum(row.outcome == "truncated" for row in view.graded) / len(view.graded) if view.graded else None
        ),
        key="truncated", page="run", title="truncated", panel="Errors: Truncated",
    ),
    Metric(
        name="fleetbus_seat_policy_step", help="Training steps of the policy of a seat", labels=("policy",),
        read=read_seat_policies(lambda row: row.step if row.trained else None), panel="Progress: Step and policy version",
    ),
    Metric(
        name="fleetbus_seat_policy_version", help="Newest published version of the policy of a seat that is trained",
        labels=("policy",), read=read_seat_policies(lambda row: row.version if row.trained else None),
        panel="Progress: Step and policy version",
    ),
    Metric(
        name="fleetbus_seat_policy_staleness_steps", labels=("policy",),
        help="Mean steps between sampling and training in the last batch of the policy of a seat",
        read=read_seat_policies(lambda row: row.staleness), panel="Staleness and stability: Staleness",
    ),
    Metric(
        name="fleetbus_seat_policy_workers", help="Inference workers that serve the policy of a seat", labels=("policy",),
        read=read_seat_policies(lambda row: len(row.workers)), panel="Fleet: Workers",
    ),
)  # fmt: skip

ERRORS = (
    Metric(
        name="fleetbus_errors_total", help="Episodes that ended in an error, by class", kind="counter", labels=("error_class",),
        read=lambda view: dict(view.state.errors.most_common(SHOWN_ERRORS)),
        key="errors", top="problems", text="cut short or failed", panel="Errors: Errors per minute",
    ),
    Metric(
        name="fleetbus_excluded_total", help="Episodes settled without being trained, by reason", kind="counter",
        labels=("reason",), read=lambda view: dict(view.state.training.excluded),
        key="excluded", top="problems", text="not trained", panel="Errors: Excluded",
    ),
    Metric(
        name="fleetbus_segments_total", help="Segments that episodes began beside their first, by reason", kind="counter",
        labels=("reason",), read=lambda view: dict(view.state.segments),
        key="segments", page="run", title="segments", top="problems", text="segments begun", panel="Errors: Segments",
    ),
    Metric(
        name="fleetbus_turns_extending_ratio", help="Share of turns that continued an earlier context, once one did not",
        unit="ratio", read=read_turns_extending,
        key="turns_extending", page="run", title="turns that extend", optional=True, top="problems",
        text="turns that extend {}", panel="Errors: Turns that extend",
    ),
    Metric(
        name="fleetbus_tool_error_ratio", help="Share of recent tool calls that failed", unit="ratio",
        read=read_tool_error_rate, key="tool_error_rate", page="run", title="tool errors", panel="Errors: Tool errors",
    ),
    Metric(
        name="fleetbus_takeovers_total", help="Attempts that took an episode over from a lost worker", kind="counter",
        read=lambda view: view.state.takeovers, panel="Errors: Take-overs",
        key="takeovers", page="log", title="take-overs", top="problems", text="take-overs {:d}",
    ),
    Metric(
        name="fleetbus_malformed_total", help="Malformed entries of the log", kind="counter",
        read=lambda view: view.state.malformed,
        key="malformed", page="log", title="malformed entries", warns=True, panel="Errors: Malformed entries",
    ),
)  # fmt: skip

LEARNER = (
    Metric(
        name="fleetbus_train_metric", help="A metric of the last training step", labels=("name",), read=read_step_others,
    ),
    Metric(
        name="fleetbus_staleness_steps", help="Steps between sampling and training in the last batch", labels=("statistic",),
        read=read_step_prefixed(STALENESS_PREFIX), panel="Staleness and stability: Staleness",
    ),
    Metric(
        name="fleetbus_groups_without_signal", help="Groups of the last batch whose rewards are all equal",
        read=lambda view: view.step.get("groups_without_signal"), panel="Staleness and stability: Groups without signal",
    ),
    Metric(
        name="fleetbus_stage_seconds", help="Seconds of a stage of the last step; wait is high when rollouts bound", unit="s",
        labels=("stage",), read=read_step_prefixed(STAGE_PREFIX), panel="Throughput: Seconds of a step by stage",
    ),
    Metric(
        name="fleetbus_episode_stage_seconds", help="Mean seconds of a stage in recent episodes", unit="s", labels=("stage",),
        read=read_episode_stages, panel="Throughput: Seconds of an episode by stage",
    ),
    Metric(
        name="fleetbus_trainer_idle_ratio", help="Share of the last step that the learner waited for episodes", unit="ratio",
        read=read_trainer_idle, panel="Throughput: Trainer idle",
    ),
)  # fmt: skip

FLEET = (
    Metric(
        name="fleetbus_episodes_open", help="Episodes without a result", labels=("state",), panel="Fleet: Open episodes",
        read=lambda view: {"waiting": view.open.waiting, "running": view.open.running},
    ),
    Metric(
        name="fleetbus_pool_episodes", help="Episodes without a result by pool of environment workers",
        labels=("pool", "state"), read=read_pools("waiting", "running"), panel="Fleet: Open episodes by pool",
    ),
    Metric(
        name="fleetbus_pool_slots", help="Slots of the workers that serve a pool: all of them, and free ones",
        labels=("pool", "state"), read=read_pools("slots", "free"), panel="Fleet: Slots by pool",
    ),
    Metric(
        name="fleetbus_pool_workers", help="Working environment workers that serve a pool", labels=("pool",),
        read=lambda view: {row.pool: row.workers for row in view.pools}, panel="Fleet: Workers by pool",
    ),
    Metric(
        name="fleetbus_oldest_open_episode_seconds", help="Age of the oldest episode without a result", unit="s",
        read=lambda view: (view.now_ns - view.open.oldest_ns) / 1e9 if view.open.oldest_ns else 0.0,
        key="oldest_open_seconds", page="run", title="oldest open episode", panel="Fleet: Oldest open episode",
    ),
    Metric(
        name="fleetbus_since_progress_seconds", help="Time since an episode ended or a step was trained", unit="s",
        read=read_since_progress, key="since_progress_seconds", panel="Fleet: Since progress",
    ),
    Metric(
        name="fleetbus_stalled", help="1 while nothing progresses or is learned, by where it is stuck", labels=("where",),
        read=lambda view: {stall.where: 1.0 for stall in view.stalls}, panel="Fleet: Stuck",
    ),
    Metric(
        name="fleetbus_over", help="1 once the run is over, by how it ended", labels=("how",),
        read=lambda view: None if view.termination is None else {view.termination.how: 1.0}, panel="Fleet: Over",
    ),
    Metric(
        name="fleetbus_workers", help="Workers by role and state", labels=("role", "state"), read=read_worker_states,
        panel="Fleet: Workers",
    ),
    Metric(
        name="fleetbus_worker_slots", help="Slots of a worker", labels=("worker", "role"),
        read=read_workers(lambda row: row.slots),
    ),
    Metric(
        name="fleetbus_worker_shared_slots", help="All slots of a worker that serves several runs", labels=("worker", "role"),
        read=read_workers(lambda row: row.share.slots if row.share is not None else None),
    ),
    Metric(
        name="fleetbus_worker_in_flight", help="Slots in use", labels=("worker", "role"),
        read=read_workers(lambda row: row.in_flight),
    ),
    Metric(
        name="fleetbus_worker_version", help="Policy version that a worker has", labels=("worker", "role"),
        read=read_workers(lambda row: row.policy_version if row.policy_version >= 0 else None), panel="Fleet: Versions",
    ),
    Metric(
        name="fleetbus_worker_silent_seconds", help="Time since a worker's last sign of life", unit="s",
        labels=("worker", "role"), read=read_workers(lambda row: row.seconds),
    ),
    Metric(
        name="fleetbus_worker_counter_total", help="What a worker counts in its heartbeat", kind="counter",
        labels=("worker", "role", "name"), read=read_worker_counters,
    ),
)  # fmt: skip

ENGINES = (
    Metric(
        name="fleetbus_engine_requests", help="Requests that an engine computes or keeps waiting", labels=("worker", "state"),
        read=read_engines("running", "running"), panel="Engines: Requests",
        key="running", page="engine", title="running", top="engines", text="{:,} requests",
    ),
    Metric(
        name="fleetbus_engine_requests", help="Requests that an engine computes or keeps waiting", labels=("worker", "state"),
        read=read_engines("waiting", "waiting"),
        key="waiting", page="engine", title="queued", top="engines", text="{:,} queued",
    ),
    Metric(
        name="fleetbus_engine_tokens_per_second", help="Tokens that an engine sampled for a worker per second", unit="1/s",
        labels=("worker",), read=read_engines("tokens_per_second"), panel="Engines: Tokens per second",
        key="tokens_per_second", page="engine", title="tokens/s", top="engines", text="{} tokens/s",
    ),
    Metric(
        name="fleetbus_engine_kv_cache_ratio", help="Share of an engine's KV cache in use", unit="ratio", labels=("worker",),
        read=read_engines("kv_cache_use"), panel="Engines: KV cache in use",
        key="kv_cache_use", page="engine", title="cache", top="engines", text="cache {} full", combine=max,
    ),
    Metric(
        name="fleetbus_engine_prefix_hit_ratio", help="Share of prompt tokens that an engine found in its cache", unit="ratio",
        labels=("worker",), read=read_engines("prefix_hits"), panel="Engines: Prefix hits",
        key="prefix_hits", page="engine", title="prefix hits", top="engines", text="prefix hits {}", combine=min,
    ),
    Metric(
        name="fleetbus_engine_preemptions_total", help="Requests that an engine dropped and computed again", kind="counter",
        labels=("worker",), read=read_engines("preemptions"), panel="Engines: Preemptions",
        key="preemptions", page="engine", title="preempted", top="engines", text="preempted {:,}",
    ),
)  # fmt: skip

LOG = (
    Metric(
        name="fleetbus_log_bytes", help="Bytes stored in the log", unit="bytes", read=lambda view: view.health.bytes,
        panel="Log: Bytes",
    ),
    Metric(
        name="fleetbus_log_limit_bytes", help="Limit of the log, 0 for none", unit="bytes",
        read=lambda view: view.health.limit_bytes, panel="Log: Bytes",
    ),
    Metric(
        name="fleetbus_log_entries_per_second", help="Entries stored per second", unit="1/s",
        read=lambda view: view.health.entries_per_second, panel="Log: Entries per second",
    ),
    Metric(
        name="fleetbus_log_pending", help="Entries that consumers have not delivered yet", labels=("kind",),
        read=read_consumers("pending"), panel="Log: Pending",
    ),
    Metric(
        name="fleetbus_log_unacked", help="Entries delivered and not acked", labels=("kind",),
        read=read_consumers("unacked"), panel="Log: Un-acked and redelivered",
    ),
    Metric(
        name="fleetbus_log_redelivered", help="Un-acked entries that were delivered more than once", labels=("kind",),
        read=read_consumers("redelivered"), panel="Log: Un-acked and redelivered",
    ),
    Metric(
        name="fleetbus_nats_connections", help="Connections of the NATS server", read=lambda view: view.server.connections,
        panel="Log: Connections",
    ),
    Metric(
        name="fleetbus_nats_servers_failing", help="NATS servers that do not answer or store nothing, of those that are asked",
        read=lambda view: None if view.server.connections is None else len(view.server.problems),
        panel="Log: Connections",
    ),
    Metric(
        name="fleetbus_nats_slow_consumers", help="Clients that the NATS server has cut off for being slow",
        read=lambda view: view.server.slow_consumers, panel="Log: Slow consumers",
    ),
    Metric(
        name="fleetbus_nats_pending_bytes", help="Bytes written for a client of NATS and not taken by it yet", unit="bytes",
        labels=("worker",), read=read_unread_bytes,
    ),
    Metric(
        name="fleetbus_nats_stream_bytes", help="Bytes of a stream of the run", unit="bytes", labels=("stream",),
        read=lambda view: {each.name: each.bytes for each in view.server.streams}, panel="Log: Streams",
    ),
)  # fmt: skip

METRICS = (*PROGRESS, *ERRORS, *LEARNER, *FLEET, *ENGINES, *LOG)
"""In the order in which the page and `top` show them."""

METRICS_BY_NAME = {metric.name: metric for metric in METRICS}
