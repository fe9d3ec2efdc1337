"""Pools of environment workers as views show them: episodes that wait in each, and the workers that serve it. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from fleetbus_workers.observe.run.state import RunState
from fleetbus_workers.observe.run.worker_registry import WorkerRow

MAX_POOLS = 64
"""Whoever may request or beat names pools: no more are shown."""


class PoolRow(msgspec.Struct, kw_only=True):
    """One pool: its episodes without a result, and the slots of the live workers that serve it. A worker that serves several
    counts in each. ``oldest_ns`` is when what has been waiting the longest was requested; 0 if nothing waits."""

    pool: str
    waiting: int = 0
    running: int = 0
    workers: int = 0
    slots: int = 0
    free: int = 0
    oldest_ns: int = 0


def count_pools(state: RunState, workers: Sequence[WorkerRow]) -> list[PoolRow]:
    """The pools that have episodes without a result, or a live worker, by name."""
    rows: dict[str, PoolRow] = {}
    for worker in workers:
        for pool in worker.pools if worker.state == "working" else ():
            if row := _get_row(rows, pool):
                row.workers += 1
                row.slots += worker.slots
                row.free += max(worker.slots - worker.in_flight, 0)
    for episode in state.episodes.rows.values():
        if episode.outcome or not episode.pool:
            continue
        if row := _get_row(rows, episode.pool):
            is_waiting = state.describe_state(episode) == "waiting"
            row.waiting += is_waiting
            row.running += not is_waiting
            if is_waiting and episode.requested_ns:
                row.oldest_ns = min(row.oldest_ns or episode.requested_ns, episode.requested_ns)
    return sorted(rows.values(), key=lambda row: row.pool)


def _get_row(rows: dict[str, PoolRow], pool: str) -> PoolRow | None:
    if pool not in rows and len(rows) < MAX_POOLS:
        rows[pool] = PoolRow(pool=pool)
    return rows.get(pool)
