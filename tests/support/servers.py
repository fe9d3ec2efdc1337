"""The server of a test, in the form that FLEETBUS_TEST_SERVER names: ``keyed`` (the default), ``open`` or ``cluster``.

``keyed`` is one server with the keys, rights and TLS that `fleetbus auth init` writes; ``cluster`` is three such servers with
routes between them and three copies of each stream; ``open`` lets everybody do everything, as a server of `fleetbus up` does.
Each worker connects with the key of its role, so a right that is missing fails the test.
"""

from __future__ import annotations

import os
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path

import anyio
import anyio.to_thread

from fleetbus.auth.access import Access, build_access
from fleetbus.auth.folder import AuthFolder, write_folder
from fleetbus.bus.base import Bus
from fleetbus.bus.nats import connect
from fleetbus.bus.nats.server import NatsServerProcess, run_server
from fleetbus.bus.streams import RunPlan, plan_run
from fleetbus.errors import BusError, UserError
from fleetbus_schemas.channels import ROLES, WORKERS
from tests.support.ports import free_ports

FORMS = ("keyed", "open", "cluster")
FORM = os.environ.get("FLEETBUS_TEST_SERVER", "keyed")
assert FORM in FORMS, f"FLEETBUS_TEST_SERVER is {FORM!r}: choose one of {', '.join(FORMS)}"

DECLARE_SECONDS = 60.0
"""For three servers to find each other and to choose the leaders of the streams."""

_VIOLATION = re.compile(r"(Publish|Subscription) Violation.*", re.IGNORECASE)


class RunningServers:
    """Servers of a test. ``url`` lists them; ``auth`` is the folder with their keys, None where they are open."""

    def __init__(self, processes: Sequence[NatsServerProcess], auth: AuthFolder | None, replicas: int) -> None:
        self.processes = processes
        self.auth = auth
        self.replicas = replicas

    @property
    def url(self) -> str:
        return ",".join(process.url for process in self.processes)

    def connect(self, run: str, worker: str, role: str = "") -> AbstractAsyncContextManager[Bus]:
        """With the key of ``role``, by default that of the worker's name (``learner-0``), and of the admin for any other."""
        role = role or guess_role(worker)
        return connect(self.url, run=run, role=role, worker=worker, **self.access(run, role))

    def access(self, run: str, role: str) -> Access:
        return build_access(role, str(self.auth.path) if self.auth else "", run)

    async def declare(self, plan: RunPlan) -> None:
        """Declare a run; servers of a cluster take a moment to find each other."""
        with anyio.fail_after(DECLARE_SECONDS):
            while True:
                with suppress(*((BusError, UserError, TimeoutError) if self.replicas > 1 else ())):
                    async with self.connect(plan.run, "declaring", "init") as bus:
                        with anyio.fail_after(20):
                            await bus.declare(plan)
                            return
                await anyio.sleep(0.5)

    async def violations(self) -> list[str]:
        """What clients tried without a right, in the words of the servers' logs."""

        def read() -> list[str]:
            texts = [process.log_file.read_text(errors="replace") for process in self.processes]
            return [found[0] for text in texts for found in _VIOLATION.finditer(text)]

        return await anyio.to_thread.run_sync(read)


def guess_role(worker: str) -> str:
    """The role that the worker's name begins with, the admin's for any other."""
    return next((role for role in ROLES if worker.startswith(role)), "admin")


def is_worker(name: str) -> bool:
    return guess_role(name) in WORKERS


@asynccontextmanager
async def running_servers(folder: Path, plans: Sequence[RunPlan], *, form: str = FORM) -> AsyncIterator[RunningServers]:
    """Servers on which these runs may be declared, with stores and keys in ``folder``."""
    if form == "open":
        async with run_server(folder / "nats") as server:
            yield RunningServers([server], None, 1)
        return
    auth = AuthFolder(folder / "keys")
    routes = [f"127.0.0.1:{port}" for port in free_ports(3)] if form == "cluster" else []
    write_folder(auth, plans, hosts=["127.0.0.1"], days=1, routes=routes)
    async with AsyncExitStack() as stack:
        processes = []
        for index, config in enumerate(_write_configs(auth, routes)):
            processes.append(await stack.enter_async_context(run_server(folder / f"nats{index}", config=config)))
        yield RunningServers(processes, auth, len(routes) or 1)


def _write_configs(auth: AuthFolder, routes: Sequence[str]) -> list[Path]:
    """One file per server. Those of a cluster differ in their names and in where they listen for each other."""
    if not routes:
        return [auth.server_config]
    shared, configs = auth.cluster_config.read_text(), []
    for index, route in enumerate(routes):
        (auth.path / f"cluster{index}.conf").write_text(shared.replace("0.0.0.0:6222", route))
        config = auth.path / f"nats-server{index}.conf"
        text = auth.server_config.read_text().replace("./cluster.conf", f"./cluster{index}.conf")
        config.write_text(f"server_name: n{index}\n{text}")
        configs.append(config)
    return configs


@asynccontextmanager
async def declared_servers(
    folder: Path, run: str, *, lanes: int = 4, max_bytes: int = 1 << 28, form: str = FORM
) -> AsyncIterator[RunningServers]:
    """As `running_servers`, with one run that is declared there."""
    replicas = 3 if form == "cluster" else 0
    plan = plan_run(run, lanes=lanes, max_bytes=max_bytes, replicas=replicas)
    async with running_servers(folder, [plan], form=form) as servers:
        await servers.declare(plan)
        yield servers
