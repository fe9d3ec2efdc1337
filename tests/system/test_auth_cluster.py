"""Only a server may join a cluster that has the certificate and the password that `fleetbus auth init --route` writes."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import urllib.request
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path, PurePosixPath

import anyio
import anyio.abc
import pytest

from fleetbus.auth.access import build_access
from fleetbus.auth.cluster_config import ROUTE_USER, cluster_config
from fleetbus.auth.folder import AuthFolder, write_folder
from fleetbus.bus.base import Bus
from fleetbus.bus.nats import connect
from fleetbus.bus.nats.server import find_server
from fleetbus.bus.streams import plan_run
from fleetbus.errors import BusError, NoResponders, UserError
from fleetbus_schemas import Subjects
from tests.support.ports import free_ports

PLAN = plan_run("a", lanes=1, max_bytes=1 << 28, replicas=3)
REFUSED = ("handshake error", "authentication error")


class Servers:
    """Ports for routes, monitoring and clients of ``count`` servers, and of one that nobody asked."""

    def __init__(self, folder: Path, count: int = 2) -> None:
        ports = free_ports(3 * count + 3)
        self.routes, self.monitors, self.clients = ports[: count + 1], ports[count + 1 : 2 * count + 2], ports[2 * count + 2 :]
        self.folder = folder
        self.processes: dict[str, anyio.abc.Process] = {}
        self.auth = AuthFolder(folder / "keys")
        every = [f"127.0.0.1:{port}" for port in self.routes[:count]]
        write_folder(self.auth, [PLAN], hosts=["127.0.0.1"], days=1, routes=every)

    def connect(self, role: str, index: int) -> AbstractAsyncContextManager[Bus]:
        """To one of the servers."""
        url = f"nats://127.0.0.1:{self.clients[index]}"
        return connect(url, run=PLAN.run, role=role, worker=role, **build_access(role, str(self.auth.path), PLAN.run))

    def config(self, index: int) -> str:
        """What `auth init` wrote, with a port of its own."""
        text = self.auth.cluster_config.read_text()
        (self.auth.path / "cluster.conf").write_text(text)
        own = text.replace("0.0.0.0:6222", f"127.0.0.1:{self.routes[index]}")
        (self.auth.path / f"cluster{index}.conf").write_text(own)
        return self.auth.server_config.read_text().replace("./cluster.conf", f"./cluster{index}.conf")

    @asynccontextmanager
    async def running(self, name: str, index: int, config: str) -> AsyncIterator[Path]:
        """Its log."""
        file, log = self.auth.path / f"{name}.conf", self.folder / f"{name}.log"
        file.write_text(config)
        command = [
            str(find_server()),
            "-c",
            str(file),
            "-js",
            "-sd",
            str(self.folder / name),
            "-p",
            str(self.clients[index]),
            "-D",
        ]
        command += [f"--server_name={name}", "-m", str(self.monitors[index]), "-l", str(log)]
        process = await anyio.open_process(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self.processes[name] = process
        try:
            yield log
        finally:
            with anyio.CancelScope(shield=True):
                with suppress(ProcessLookupError):
                    process.kill()
                await process.wait()
                await process.aclose()

    async def peers(self, index: int) -> set[str]:
        """Whom the server has routes to."""

        def ask() -> set[str]:
            url = f"http://127.0.0.1:{self.monitors[index]}/routez"
            return {each["remote_name"] for each in json.load(urllib.request.urlopen(url, timeout=5))["routes"]}

        with suppress(OSError):
            return await anyio.to_thread.run_sync(ask)
        return set()

    async def until_peers(self, index: int, peers: set[str]) -> None:
        while await self.peers(index) != peers:  # noqa: ASYNC110  # another process's routes
            await anyio.sleep(0.05)


def _read(log: Path) -> str:
    return log.read_text() if log.exists() else ""


async def wait_for_output(log: Path, words: tuple[str, ...], known: int = 0) -> None:
    while not any(word in _read(log)[known:] for word in words):  # noqa: ASYNC110  # another process writes it
        await anyio.sleep(0.05)


def rogue_configs(servers: Servers, folder: Path) -> dict[str, str]:
    """Servers that would like to join: with nothing, with a certificate of their own, with the password alone, with the
    certificate alone."""
    other = AuthFolder(folder / "other")
    write_folder(other, [plan_run("a", lanes=1)], hosts=["127.0.0.1"], days=1)
    password, target = servers.auth.route_password.read_text(), [f"127.0.0.1:{servers.routes[0]}"]
    listen = f"127.0.0.1:{servers.routes[2]}"

    def configured(password: str, keys: AuthFolder) -> str:
        return cluster_config(target, password, PurePosixPath(keys.path.as_posix()), listen=listen)

    clear = f'cluster {{ name: fleetbus, listen: "{listen}", routes: ["nats://{ROUTE_USER}:{password}@{target[0]}"] }}'
    trusting = AuthFolder(folder / "trusting")  # its own certificate, and the fleet's authority to trust the others
    shutil.copytree(other.path, trusting.path)
    shutil.copy(servers.auth.authority, trusting.authority)
    return {
        "in the clear": clear,
        "another authority": configured(password, other),
        "a certificate of its own": configured(password, trusting),
        "another password": configured("guessed", servers.auth),
    }


@pytest.mark.parametrize("how", ["in the clear", "another authority", "a certificate of its own", "another password"])
async def test_a_server_without_the_certificate_and_the_password_joins_no_cluster(how: str, tmp_path: Path) -> None:
    servers = Servers(tmp_path)
    with anyio.fail_after(50):
        async with servers.running("n0", 0, servers.config(0)) as log, servers.running("n1", 1, servers.config(1)):
            await servers.until_peers(0, {"n1"})
            known = len(_read(log))
            async with servers.running("rogue", 2, rogue_configs(servers, tmp_path)[how]) as rogue:
                await wait_for_output(rogue, ("Trying to connect to route",))
                await wait_for_output(log, REFUSED, known)
                assert "rogue" not in await servers.peers(0)
                assert await servers.peers(2) <= {""}
            assert await servers.peers(0) == {"n1"}


async def test_without_them_any_server_joins(tmp_path: Path) -> None:
    """What they are for."""
    servers = Servers(tmp_path)
    here, there = (f"127.0.0.1:{port}" for port in (servers.routes[0], servers.routes[2]))
    with anyio.fail_after(50):
        own = f'cluster {{ name: fleetbus, listen: "{here}", routes: ["nats://{here}"] }}'
        async with servers.running("n0", 0, own):
            config = f'cluster {{ name: fleetbus, listen: "{there}", routes: ["nats://{here}"] }}'
            async with servers.running("rogue", 2, config):
                await servers.until_peers(0, {"rogue"})


@pytest.mark.integration
async def test_routes_to_a_server_that_hangs_are_closed_within_seconds_and_it_joins_again_when_it_goes_on(
    tmp_path: Path,
) -> None:
    """With its routes open it slows down every publish to the others; by default they stay open for minutes."""
    servers = Servers(tmp_path)
    with anyio.fail_after(50):
        async with servers.running("n0", 0, servers.config(0)), servers.running("n1", 1, servers.config(1)):
            await servers.until_peers(0, {"n1"})
            servers.processes["n1"].send_signal(signal.SIGSTOP)
            await servers.until_peers(0, set())
            servers.processes["n1"].send_signal(signal.SIGCONT)
            await servers.until_peers(0, {"n1"})


def test_the_password_stays_and_stands_in_files_of_the_owner_alone(tmp_path: Path) -> None:
    servers = Servers(tmp_path)
    password = servers.auth.route_password.read_text()
    write_folder(servers.auth, [plan_run("a", lanes=1)], hosts=[], days=1, routes=["n:1"])
    assert servers.auth.route_password.read_text() == password
    holders = [file for file in servers.auth.path.iterdir() if password in file.read_text()]
    assert sorted(file.name for file in holders) == ["cluster.conf", "route-password"]
    assert all(file.stat().st_mode & 0o077 == 0 for file in holders)


async def declared(servers: Servers) -> None:
    """The servers take a moment to elect a leader."""
    while True:
        with suppress(BusError, UserError):
            async with servers.connect("init", 0) as bus:
                with anyio.fail_after(20):
                    await bus.declare(PLAN)
                    return
        await anyio.sleep(0.5)


@pytest.mark.slow
@pytest.mark.timeout(150)
@pytest.mark.parametrize("where", [(0, 1, 2), (1, 2, 0), (2, 0, 1)])
async def test_accounts_reach_the_streams_whichever_server_a_worker_is_on(where: tuple[int, int, int], tmp_path: Path) -> None:
    """Learner, environment and inference worker each on another server, the log's leader on any of them."""
    servers, subjects = Servers(tmp_path, 3), Subjects("a")
    with anyio.fail_after(140):
        async with AsyncExitStack() as stack:
            for index in range(3):
                await stack.enter_async_context(servers.running(f"n{index}", index, servers.config(index)))
            await declared(servers)
            roles = ("learner", "environment", "inference")
            buses = [await stack.enter_async_context(servers.connect(*each)) for each in zip(roles, where, strict=True)]
            learner, environment, inference = buses
            tasks = await stack.enter_async_context(environment.pull("task_default", credits=8))
            observations = await stack.enter_async_context(inference.pull("obs_default_any", credits=8))
            heartbeats = await stack.enter_async_context(environment.listen(subjects.heartbeat("inference", "*")))
            for number in range(20):
                episode = f"e{number}"
                await learner.publish(subjects.task("default", episode), b"task", expected_last=0)
                taken = await tasks.receive()
                assert taken.message.subject == subjects.task("default", episode)
                tasks.grant()
                await environment.publish(subjects.observation("default", "any", episode), b"seen")
                await taken.ack()
                await (await observations.receive()).ack()
                observations.grant()
                await inference.publish(subjects.action("e0", episode), b"act", expected_last=0)
                assert [each.payload for each in await inference.history([subjects.action("e0", episode)])] == [b"act"]
                await inference.broadcast(subjects.heartbeat("inference", "i"), b"beat")
                assert (await heartbeats.receive())[1] == b"beat"
            with pytest.raises(NoResponders):
                await environment.request(subjects.control("inference", "gone", "ping"), b"ping", timeout=60)
            entries = [entry.payload async for entry in learner.scan([subjects.log])]
            assert entries == [b"task", b"seen", b"act"] * 20
