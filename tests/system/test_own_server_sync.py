"""The part of the log that a loss of power may take: the server that `up` starts syncs as it is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from fleetbus.bus.nats import connect
from fleetbus.bus.nats.server import run_server
from fleetbus.bus.streams import plan_run
from fleetbus_schemas import Subjects


@pytest.mark.parametrize(("seconds", "written"), [(1.0, "1000ms"), (0.0, "always"), (0.25, "250ms")])
async def test_a_server_is_told_when_to_sync_beside_the_configuration_that_is_given(
    seconds: float, written: str, tmp_path: Path
) -> None:
    given = tmp_path / "given.conf"
    given.write_text("server_name: given\n")
    async with (
        run_server(tmp_path / "store", config=given, sync_seconds=seconds) as server,
        connect(server.url, run="r") as bus,
    ):
        await bus.declare(plan_run("r", lanes=1))
        await bus.publish(Subjects("r").episode("e"), b"claim", expected_last=0)
        assert f"sync_interval: {written}" in (server.store / "nats-server.conf").read_text()
        log = server.log_file.read_text()
    assert "given" in log
