"""Shared by the loop benchmarks: numbers of sessions and turns, the figures of a run, a server on a temporary store."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec

from fleetbus.bus.nats.server import run_server
from fleetbus.errors import UserError


class LoadPlan(msgspec.Struct, frozen=True):
    """``sessions`` at a time, each of ``turns`` turns."""

    sessions: int
    turns: int


def parse_plan(sessions: str, turns: str) -> list[LoadPlan]:
    """Plans from two comma-separated lists of equal length."""
    pairs = list(zip(sessions.split(","), turns.split(","), strict=False))
    if len(pairs) != len(sessions.split(",")) or not all(part.isdigit() for pair in pairs for part in pair):
        raise UserError(f"--sessions {sessions} and --turns {turns} must be lists of as many whole numbers")
    return [LoadPlan(int(count), int(length)) for count, length in pairs]


PERCENTILES = (1, 5, 10, 25, 50, 75, 90, 95, 99, 99.9)


def compute_distribution(latencies: Sequence[float]) -> dict[str, float]:
    """Milliseconds by percentile."""
    ordered = sorted(latencies)
    return {str(share): round(ordered[int(len(ordered) * share / 100)] * 1e3, 3) for share in PERCENTILES}


def summarize_latencies(latencies: Sequence[float], *, wall_seconds: float, cpu_seconds: float) -> dict[str, float]:
    """Steps per second, median and 99th percentile in milliseconds, CPU of the asking process in microseconds per step."""
    ordered = sorted(latencies)
    steps = len(ordered)
    return {
        "steps_per_second": round(steps / wall_seconds, 1),
        "p50_ms": round(ordered[steps // 2] * 1e3, 3),
        "p99_ms": round(ordered[int(steps * 0.99)] * 1e3, 3),
        "cpu_us_per_step": round(cpu_seconds / steps * 1e6, 1),
    }


@asynccontextmanager
async def temporary_server() -> AsyncIterator[str]:
    """The URL of a server of one's own, gone with its store at the end; the server also ends when this process is killed."""
    with tempfile.TemporaryDirectory(prefix="fleetbus-benchmark-") as store:
        async with run_server(Path(store), ends_with_parent=True) as server:
            yield server.url
