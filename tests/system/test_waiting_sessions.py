"""A thousand sessions that wait for an action in one environment worker, through a real server."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.waiting_sessions import MOST_KIB, measure
from fleetbus.bus.nats.server import run_server

pytestmark = pytest.mark.slow


@pytest.mark.timeout(600)
async def test_a_thousand_waiting_sessions_take_little_memory_and_no_heartbeat_is_missed(tmp_path: Path) -> None:
    async with run_server(tmp_path / "store") as server:
        measured = await measure(server.url, sessions=1000, seconds=10)
    assert measured.missed_heartbeats == 0
    assert measured.kib_per_session <= MOST_KIB
