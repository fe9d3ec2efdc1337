"""A server with the keys, rights and TLS that `fleetbus auth init` writes, and connections to it as any user."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from pathlib import Path

import pytest
from anyio.from_thread import BlockingPortal, start_blocking_portal

from fleetbus.auth.access import build_access
from fleetbus.auth.folder import AuthFolder, write_folder
from fleetbus.auth.leaf_config import LEAF_PORT
from fleetbus.bus.base import Bus
from fleetbus.bus.nats import connect
from fleetbus.bus.nats.server import NatsServerProcess, run_server
from fleetbus.bus.streams import plan_run
from fleetbus_schemas import Subjects
from fleetbus_schemas.channels import ROLES
from tests.support.ports import free_ports
from tests.support.small_deployment import LANES, RUN

TRUST = "trust"
"""The run that forbidden things are tried on."""

SUBJECTS = Subjects(TRUST)
LOG = f"fb_{TRUST}"


class SecuredServer:
    """A server with the configuration that was written, and connections to it as any user. Leaf nodes may connect, too."""

    def __init__(self, folder: Path, server: NatsServerProcess, portal: BlockingPortal, leaf_port: int) -> None:
        self.folder = folder
        self.leaf_port = leaf_port
        self.server = server
        self.portal = portal

    def connect(self, role: str, *, run: str = TRUST, worker: str = "") -> AbstractAsyncContextManager[Bus]:
        access = build_access(role, str(self.folder), run)
        return connect(self.server.url, run=run, role=role, worker=worker or f"{role}-1", **access)


async def _declare(place: SecuredServer) -> None:
    async with place.connect("init") as bus:
        await bus.declare(plan_run(TRUST, lanes=LANES, max_bytes=1 << 28))
        for subject in (SUBJECTS.task("default", "e0"), SUBJECTS.episode("e0"), SUBJECTS.action("e0", "e0")):
            await bus.publish(subject, b"an entry")


async def scan(bus: Bus, subject: str) -> list[bytes]:
    return [entry.payload async for entry in bus.scan([subject])]


@contextmanager
def secured_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecuredServer]:
    """With the streams of `TRUST` declared and three entries in its log; `RUN` is allowed and not declared."""
    folder, store = tmp_path_factory.mktemp("auth"), tmp_path_factory.mktemp("nats")
    plans = [plan_run(run, lanes=LANES, max_bytes=1 << 28) for run in (TRUST, RUN)]
    files = AuthFolder(folder)
    write_folder(files, plans, hosts=["127.0.0.1"], days=1, leaf_roles=[role for role in ROLES if role != "admin"])
    (leaf_port,) = free_ports(1)
    text = files.server_config.read_text().replace(f"0.0.0.0:{LEAF_PORT}", f"127.0.0.1:{leaf_port}")
    files.server_config.write_text(text)
    with start_blocking_portal() as portal:
        with portal.wrap_async_context_manager(run_server(store, config=files.server_config)) as server:
            place = SecuredServer(folder, server, portal, leaf_port)
            portal.call(_declare, place)
            yield place
