"""The protocol of a run on a real server: who declares it raises it, and a worker that does not fit waits and says so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio
import pytest

from fleetbus.bus.nats import connect
from fleetbus.bus.nats.bus import NatsBus
from fleetbus.bus.nats.server import run_server
from fleetbus.bus.streams import plan_run
from fleetbus.config.settings import Configuration, RunSettings
from fleetbus_schemas.protocol import OWN, PROTOCOL, ProtocolVersion
from fleetbus_workers.assembly.work import serve_role
from fleetbus_workers.cli.look.diagnosis import check_bus

pytestmark = [pytest.mark.timeout(60), pytest.mark.integration]


async def set_protocol(bus: NatsBus, protocol: int, needed: int) -> None:
    """As a program of another version would declare it."""
    api, log = bus._connection.api, bus._log
    config: dict[str, Any] = (await api.ask(f"STREAM.INFO.{log}"))["config"]
    told = {"fleetbus_protocol": str(protocol), "fleetbus_needed_protocol": str(needed), "site": "north"}
    await api.ask(f"STREAM.UPDATE.{log}", config | {"metadata": (config.get("metadata") or {}) | told})


async def test_declaring_a_run_raises_its_protocol_and_never_lowers_it_nor_touches_what_others_wrote(tmp_path: Path) -> None:
    async with run_server(tmp_path) as server, connect(server.url, run="r", worker="w") as bus:
        await bus.declare(plan_run("r", lanes=1))
        assert await bus.run_protocol() == OWN
        await set_protocol(bus, 0, 0)
        await bus.declare(plan_run("r", lanes=1))
        assert await bus.run_protocol() == OWN
        await set_protocol(bus, PROTOCOL + 5, PROTOCOL + 4)
        await bus.declare(plan_run("r", lanes=1))
        assert await bus.run_protocol() == ProtocolVersion(protocol=PROTOCOL + 5, needed=PROTOCOL + 4)
        config = (await bus._connection.api.ask("STREAM.INFO.fb_r"))["config"]
        assert config["metadata"]["site"] == "north"


async def test_a_worker_that_is_too_old_does_no_work_until_it_fits_and_doctor_says_why(tmp_path: Path) -> None:
    begun, drain = anyio.Event(), anyio.Event()

    async def work(*_: object) -> None:
        begun.set()

    configuration = Configuration(run=RunSettings(name="r"))
    async with run_server(tmp_path) as server, connect(server.url, run="r", worker="w") as bus:
        await bus.declare(plan_run("r"))
        await set_protocol(bus, PROTOCOL + 1, PROTOCOL + 1)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(serve_role, "environment", work, configuration, "e-1", server.url, drain)
            findings = {finding.name: finding for finding in await check_bus(server.url, "r")}
            assert findings["protocol"].state == "warning" and "too old" in findings["protocol"].detail
            assert findings["workers"].detail == "1 heard, all of one version"
            assert not begun.is_set()
            await set_protocol(bus, PROTOCOL + 1, PROTOCOL)
            with anyio.fail_after(20):
                await begun.wait()
        assert (await bus.log_state()).last_sequence == 0
