"""Servers and clients of HTTP and WebSockets run on asyncio, as the gateways do."""

from __future__ import annotations

import pytest

from fleetbus.delivery import worker_lifecycle
from tests.support.backends import asyncio_alone

anyio_backend = asyncio_alone


@pytest.fixture(autouse=True)
def frequent_heartbeats(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests wait for heartbeats of workers in this process to hear that slots are free; the clock is the real one."""
    monkeypatch.setattr(worker_lifecycle, "HEARTBEAT_SECONDS", 0.1)
