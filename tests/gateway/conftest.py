"""Servers and clients of HTTP and WebSockets run on asyncio, as the gateways do."""

from __future__ import annotations

import pytest

from fleetbus.delivery import worker_lifecycle


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(autouse=True)
def frequent_heartbeats(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests wait for heartbeats of workers in this process to hear that slots are free; the clock is the real one."""
    monkeypatch.setattr(worker_lifecycle, "HEARTBEAT_SECONDS", 0.1)
