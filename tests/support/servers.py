"""The server of a test, in the form that FLEETBUS_TEST_SERVER names: ``keyed`` (the default), ``open`` or ``cluster``.

``keyed`` is one server with the keys, rights and TLS that `fleetbus auth init` writes; ``cluster`` is three such servers with
routes between them and three copies of each stream; ``open`` lets everybody do everything, and ``local`` whoever may read its
folder, as a server of `fleetbus up` does.
Each worker connects with the key of its role, so a right that is missing fails the test.

`run_server` and `connect` take the place of fleetbus's own in tests: the same calls, against a server of that form. A run is
let in when somebody first connects to it. Tests about a server of a certain form (odd ones, wrappers, accounts) import
fleetbus's own (docs/decisions/0162-tests-run-with-keys.md).
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import msgspec
import pytest

from fleetbus.auth.access import Access, build_access
from fleetbus.auth.folder import AuthFolder, write_folder
from fleetbus.auth.leaf_config import LEAF_PORT
from fleetbus.auth.local_key import write_local_config
from fleetbus.bus import nats
from fleetbus.bus.base import Bus
from fleetbus.bus.nats.server import NatsServerProcess
from fleetbus.bus.nats.server import run_server as run_one_server
from fleetbus.bus.streams import RunPlan, plan_run
from fleetbus.client.blocking import AUTH_VARIABLE
from fleetbus.errors import BusError, UserError
from fleetbus_schemas.channels import ROLES
from tests.support.ports import free_ports

FORMS = ("keyed", "open", "local", "cluster")
FORM = os.environ.get("FLEETBUS_TEST_SERVER", "keyed")
assert FORM in FORMS, f"FLEETBUS_TEST_SERVER is {FORM!r}: choose one of {', '.join(FORMS)}"

needs_only_copy = pytest.mark.skipif(FORM == "cluster", reason="the files of one server of three are not the whole log")
"""For tests that take away, put back or read the files of the server: `test_log_back_in_time` does so with three."""

DECLARE_SECONDS = 60.0
"""For three servers to find each other and to choose the leaders of the streams."""

_VIOLATION = re.compile(r"(Publish|Subscription) Violation.*", re.IGNORECASE)


LANES = 16
"""As many as a run has by default: its rights are for so many."""

RELOADED = "Reloaded server configuration"

RELOADS = 2
"""The first one makes the account of a further run; what its workers import of that account works after the second."""

_running: dict[str, RunningServers] = {}
"""By URL, what `connect` needs to know of the servers that run."""


class RunningServers:
    """Servers of a test. ``url`` lists them; ``auth`` is the folder with their keys, None where they are open."""

    def __init__(self, processes: Sequence[NatsServerProcess], auth: AuthFolder | None, plans: Sequence[RunPlan]) -> None:
        self.processes = processes
        self.auth = auth
        self.replicas = len(processes)
        self.websockets: Sequence[str] = ()
        self._plans = {plan.run: plan for plan in plans}
        self._lock = threading.Lock()

    @property
    def url(self) -> str:
        return ",".join(process.url for process in self.processes)

    def connect(self, run: str, worker: str, role: str = "") -> AbstractAsyncContextManager[Bus]:
        """With the key of ``role``, by default that of the worker's name (``learner-0``), and of the admin for any other."""
        role = role or guess_role(worker)
        return nats.connect(self.url, run=run, role=role, worker=worker, **self.access(run, role))

    def access(self, run: str, role: str) -> Access:
        access = build_access(role, str(self.auth.path) if self.auth else "", run)
        if self.replicas > 1 and "plan_on_server" in access:
            access["plan_on_server"] = partial(_plan_copies, access["plan_on_server"], self.replicas)
        return access

    def let_in(self, run: str) -> None:
        """Write the configuration with one more run, and have the servers read it; blocks until they did."""
        with self._lock:
            if self.auth is None or run in self._plans:
                return
            self._plans[run] = plan_run(run, lanes=LANES)
            routes = _read_routes(self.auth)
            plans, websocket = list(self._plans.values()), next(iter(self.websockets), "")
            write_folder(self.auth, plans, hosts=["127.0.0.1"], days=1, routes=routes, websocket=websocket)
            _write_configs(self.auth, routes, websockets=self.websockets)
            for _ in range(RELOADS):
                for process in self.processes:
                    _reload(process)

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


def _reload(process: NatsServerProcess) -> None:
    before = process.log_file.read_text().count(RELOADED)
    os.kill(process.pid, signal.SIGHUP)
    while process.log_file.read_text().count(RELOADED) == before:
        time.sleep(0.01)


def guess_role(worker: str) -> str:
    """The role that the worker's name begins with, the admin's for any other."""
    return next((role for role in ROLES if worker.startswith(role)), "admin")


@asynccontextmanager
async def running_servers(
    folder: Path,
    plans: Sequence[RunPlan],
    *,
    form: str = FORM,
    store: Path | None = None,
    leaf_ports: Sequence[int] = (),
    hosts: Sequence[str] = ("127.0.0.1",),
    websockets: Sequence[str] = (),
    **options: Any,
) -> AsyncIterator[RunningServers]:
    """Servers on which these runs may be declared, with keys and, but for ``store``, their stores in ``folder``; ``options`` as
    `run_one_server`. With ``leaf_ports`` each listens for leaf nodes there, with ``websockets`` for WebSocket at that
    ``HOST:PORT``; ``hosts`` are the names in their certificate."""
    store = store or folder / "nats"
    if form in ("open", "local"):
        config = write_local_config(store) if form == "local" else None
        async with run_one_server(store, config=config, **options) as server:
            yield RunningServers([server], None, plans)
        return
    auth = AuthFolder(folder / "keys")
    routes = [f"127.0.0.1:{port}" for port in free_ports(3)] if form == "cluster" else []
    leaf_roles = ["environment"] if leaf_ports else []
    websocket = next(iter(websockets), "")
    write_folder(auth, plans, hosts=hosts, days=1, routes=routes, leaf_roles=leaf_roles, websocket=websocket)
    async with AsyncExitStack() as stack:
        processes = []
        for index, config in enumerate(_write_configs(auth, routes, leaf_ports, websockets)):
            own = store if index == 0 else folder / f"nats{index}"
            processes.append(await stack.enter_async_context(run_one_server(own, config=config, **options)))
        running = RunningServers(processes, auth, plans)
        running.websockets = websockets
        yield running


def _write_configs(
    auth: AuthFolder, routes: Sequence[str], leaf_ports: Sequence[int] = (), websockets: Sequence[str] = ()
) -> list[Path]:
    """One file per server. Those of a cluster differ in their names and in where they listen for each other."""
    anywhere = f"0.0.0.0:{LEAF_PORT}"
    if not routes:
        if leaf_ports:
            written = auth.server_config.read_text()
            auth.server_config.write_text(written.replace(anywhere, f"127.0.0.1:{leaf_ports[0]}"))
        return [auth.server_config]
    shared, configs = auth.cluster_config.read_text(), []
    for index, route in enumerate(routes):
        (auth.path / f"cluster{index}.conf").write_text(shared.replace("0.0.0.0:6222", route))
        config = auth.path / f"nats-server{index}.conf"
        text = auth.server_config.read_text().replace("./cluster.conf", f"./cluster{index}.conf")
        text = text.replace(anywhere, f"127.0.0.1:{leaf_ports[index]}") if leaf_ports else text
        text = text.replace(websockets[0], websockets[index]) if websockets else text
        config.write_text(f"server_name: n{index}\n{text}")
        configs.append(config)
    return configs


def _read_routes(auth: AuthFolder) -> list[str]:
    return re.findall(r"@([\d.]+:\d+)", auth.cluster_config.read_text()) if auth.cluster_config.is_file() else []


def _plan_copies(rename: Callable[[RunPlan], RunPlan], replicas: int, plan: RunPlan) -> RunPlan:
    """The plan as it is declared on several servers: streams that say nothing else have a copy on each."""
    log, lanes = (
        stream if stream.replicas else msgspec.structs.replace(stream, replicas=replicas) for stream in (plan.log, plan.lanes)
    )
    return rename(msgspec.structs.replace(plan, log=log, lanes=lanes))


class ServerGroup:
    """Several servers as if they were one: killed and started together; all else is asked of the first."""

    def __init__(self, servers: RunningServers) -> None:
        self._servers = servers
        self.url = servers.url

    async def kill(self) -> None:
        for process in self._servers.processes:
            await process.kill()

    async def stop(self) -> None:
        for process in self._servers.processes:
            await process.stop()

    async def restart(self) -> None:
        async with anyio.create_task_group() as tasks:  # none is ready before it has found the others
            for process in self._servers.processes:
                tasks.start_soon(process.restart)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._servers.processes[0], name)


@asynccontextmanager
async def run_server(store: Path, **options: Any) -> AsyncIterator[Any]:
    """As `fleetbus.bus.nats.server.run_server`. While a server with keys runs, commands find them by their variable. One with
    a configuration of its own is open."""
    if FORM in ("open", "local") or "config" in options:
        config = options.pop("config", None) or (write_local_config(store) if FORM == "local" else None)
        async with run_one_server(store, config=config, **options) as server:
            yield server
        return
    folder = Path(await anyio.to_thread.run_sync(partial(tempfile.mkdtemp, prefix="servers")))
    before = os.environ.get(AUTH_VARIABLE)
    try:
        async with running_servers(folder, [plan_run("unused", lanes=1)], store=store, **options) as servers:
            assert servers.auth is not None
            _running[servers.url], os.environ[AUTH_VARIABLE] = servers, str(servers.auth.path)
            yield servers.processes[0] if servers.replicas == 1 else ServerGroup(servers)
            del _running[servers.url]
    finally:
        os.environ.pop(AUTH_VARIABLE, None)
        if before is not None:
            os.environ[AUTH_VARIABLE] = before
        await anyio.to_thread.run_sync(partial(shutil.rmtree, folder, ignore_errors=True))


@asynccontextmanager
async def connect(url: str, *, run: str, role: str = "worker", worker: str = "", **options: Any) -> AsyncIterator[Any]:
    """As `fleetbus.bus.nats.connect`, with the key of the role where `run_server` started the server with keys."""
    servers = next((servers for known, servers in _running.items() if known == url or url in known.split(",")), None)
    if servers is not None:
        user = guess_role(worker) if role in ("worker", "test", "") else role
        await anyio.to_thread.run_sync(servers.let_in, run)
        options = {**servers.access(run, user), **options}
    give_up_at = anyio.current_time() + DECLARE_SECONDS
    async with AsyncExitStack() as stack:
        while True:
            try:
                opened = nats.connect(url, run=run, role=role, worker=worker, **options)
                bus = await stack.enter_async_context(opened)
                break
            except UserError:  # of a cluster that has not chosen its leaders yet
                if servers is None or servers.replicas == 1 or anyio.current_time() > give_up_at:
                    raise
                await anyio.sleep(0.25)
        yield bus


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
