"""Releases of different protocols on one run: who does not fit waits and says so; who declares is not set back."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest
from structlog.testing import capture_logs

from fleetbus.bus.nats import declare as declaring
from fleetbus.bus.nats.bus import NatsBus
from fleetbus.bus.streams import plan_run
from fleetbus.errors import UserError
from fleetbus_schemas.protocol import PROTOCOL
from fleetbus_workers.assembly import protocol_check
from fleetbus_workers.assembly.protocol_check import wait_for_protocol
from tests.support.servers import RunningServers, declared_servers

pytestmark = pytest.mark.integration

RUN = "protocols"


@asynccontextmanager
async def admin(servers: RunningServers) -> AsyncIterator[NatsBus]:
    async with servers.connect(RUN, "admin-0", "init") as bus:
        assert isinstance(bus, NatsBus)
        yield bus


async def set_metadata(bus: NatsBus, metadata: dict[str, str]) -> None:
    """What the log of another release says."""
    api, stream = bus._connection.api, f"fb_{RUN}"
    config = (await api.ask(f"STREAM.INFO.{stream}"))["config"]
    await api.ask(f"STREAM.UPDATE.{stream}", config | {"metadata": metadata})


async def redeclare(servers: RunningServers) -> None:
    await servers.declare(plan_run(RUN, lanes=4, max_bytes=1 << 28, replicas=servers.replicas if servers.replicas > 1 else 0))


async def test_a_run_has_the_protocol_of_the_release_that_declared_it(tmp_path: Path) -> None:
    async with declared_servers(tmp_path, RUN) as servers, servers.connect(RUN, "environment-0") as bus:
        assert (await bus.log_state()).protocol == PROTOCOL
        assert await wait_for_protocol(bus, RUN, anyio.Event())


@pytest.mark.parametrize(
    ("metadata", "says"),
    [
        ({}, "too new"),
        ({"fleetbus_protocol": str(PROTOCOL - 1)}, "too new"),
        ({"fleetbus_protocol": str(PROTOCOL + 1)}, "too old"),
        ({"fleetbus_protocol": "none"}, "too new"),
    ],
)
async def test_a_worker_of_another_protocol_says_so_once_and_waits_until_it_fits(
    metadata: dict[str, str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(protocol_check, "CHECK_SECONDS", 0.05)
    states = 0
    async with declared_servers(tmp_path, RUN) as servers, admin(servers) as bus, servers.connect(RUN, "environment-0") as own:
        await set_metadata(bus, metadata)
        ask = own.log_state

        async def count() -> object:
            nonlocal states
            states += 1
            if states == 3:
                await set_metadata(bus, {"fleetbus_protocol": str(PROTOCOL)})
            return await ask()

        monkeypatch.setattr(own, "log_state", count)
        with capture_logs() as lines, anyio.fail_after(30):
            assert await wait_for_protocol(own, RUN, anyio.Event())
    assert [says in line["event"] for line in lines if line["log_level"] == "error"] == [True]


async def test_a_worker_that_waits_ends_when_it_is_drained(tmp_path: Path) -> None:
    drain = anyio.Event()
    async with declared_servers(tmp_path, RUN) as servers, admin(servers) as bus, servers.connect(RUN, "learner-0") as own:
        await set_metadata(bus, {"fleetbus_protocol": str(PROTOCOL + 1)})
        with anyio.fail_after(30):
            async with anyio.create_task_group() as group:
                group.start_soon(wait_for_protocol, own, RUN, drain)
                await anyio.wait_all_tasks_blocked()
                drain.set()


async def test_declaring_again_raises_an_earlier_protocol_and_keeps_the_rest(tmp_path: Path) -> None:
    async with declared_servers(tmp_path, RUN) as servers, admin(servers) as bus:
        await set_metadata(bus, {"owner": "somebody"})
        await redeclare(servers)
        metadata = (await bus._connection.api.ask(f"STREAM.INFO.fb_{RUN}"))["config"]["metadata"]
        assert metadata["owner"] == "somebody"
        assert metadata["fleetbus_protocol"] == str(PROTOCOL)


async def test_a_release_does_not_declare_a_run_that_a_later_one_has_declared(tmp_path: Path) -> None:
    async with declared_servers(tmp_path, RUN) as servers, admin(servers) as bus:
        await set_metadata(bus, {"fleetbus_protocol": str(PROTOCOL + 1)})
        with pytest.raises(UserError, match="by a later release"):
            await bus.declare(plan_run(RUN, lanes=4, max_bytes=1 << 28))
        config = (await bus._connection.api.ask(f"STREAM.INFO.fb_{RUN}"))["config"]
        assert declaring.read_protocol(config) == PROTOCOL + 1
