"""Before `up` starts a worker again it declares what somebody removed, but never a log: an empty one would begin the run."""

from __future__ import annotations

from pathlib import Path

import pytest

from fleetbus.bus.nats import connect
from fleetbus.bus.nats.api import ApiRefused
from fleetbus.bus.nats.server import run_server
from fleetbus.bus.streams import log_stream, tasks_consumer
from fleetbus_workers.up.process_plans import build_stream_plan
from fleetbus_workers.up.run import declare_again
from tests.support.small_deployment import RUN, build_configuration

LOG = log_stream(RUN)


async def test_a_consumer_that_somebody_removed_is_declared_again_and_a_log_is_not(tmp_path: Path) -> None:
    configuration = build_configuration()
    async with run_server(tmp_path) as server, connect(server.url, run=RUN) as bus:
        await bus.declare(build_stream_plan(configuration))
        ask = bus._connection.api.ask
        await ask(f"CONSUMER.DELETE.{LOG}.{tasks_consumer('default')}")
        await declare_again(bus, configuration)
        assert (await ask(f"CONSUMER.INFO.{LOG}.{tasks_consumer('default')}"))["name"] == tasks_consumer("default")
        await ask(f"STREAM.DELETE.{LOG}")
        await declare_again(bus, configuration)
        with pytest.raises(ApiRefused, match="stream not found"):
            await ask(f"STREAM.INFO.{LOG}")


async def test_a_server_that_is_away_delays_no_worker_for_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fleetbus_workers.up.run.DECLARE_SECONDS", 0.1)
    async with run_server(tmp_path) as server, connect(server.url, run=RUN) as bus:
        await bus.declare(build_stream_plan(build_configuration()))
        await server.kill()
        await declare_again(bus, build_configuration())
