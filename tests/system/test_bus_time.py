"""Deadlines and ages are counted by the server's clock: a worker whose machine has another time plays as all others do."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from fleetbus.bus.nats import connect
from fleetbus.bus.nats.bus import NatsBus
from fleetbus.bus.nats.server import run_server
from fleetbus.bus.streams import plan_run

TRUE_TIME_NS = time.time_ns
WRONG_BY_SECONDS = 3600
LIMIT_SECONDS = 5.0


async def measure_error_seconds(folder: Path) -> float:
    """By how much the time of a bus differs from the server's, on a machine whose clock is an hour fast."""
    async with run_server(folder) as server, connect(server.url, run="r", worker="w") as bus:
        await bus.declare(plan_run("r", lanes=1))
        return (bus.now_ns() - TRUE_TIME_NS()) / 1e9


@pytest.fixture(autouse=True)
def wrong_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "time_ns", lambda: TRUE_TIME_NS() + WRONG_BY_SECONDS * 10**9)


async def test_a_worker_with_a_wrong_clock_has_the_time_of_the_server(tmp_path: Path) -> None:
    assert abs(await measure_error_seconds(tmp_path)) < LIMIT_SECONDS


async def test_a_bus_that_takes_its_own_clock_for_the_servers_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NatsBus, "now_ns", lambda self: time.time_ns())
    assert abs(await measure_error_seconds(tmp_path)) > LIMIT_SECONDS
