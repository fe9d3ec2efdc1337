"""Three nats-servers with routes among them, and a run declared on them with three copies of its log."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import anyio

from fleetbus.bus.nats import connect
from fleetbus.bus.nats.bus import NatsBus
from fleetbus.bus.nats.server import find_server
from fleetbus.bus.streams import plan_run
from fleetbus.errors import BusError, UserError
from tests.support.ports import free_ports
from tests.support.small_deployment import LANES, RUN


class Cluster:
    """Three nats-servers with routes among them, as deploy/kubernetes/nats.yaml starts them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        ports = free_ports(9)
        self.clients, self._routes, self._monitors = ports[:3], ports[3:6], ports[6:]
        self.processes: dict[int, anyio.abc.Process] = {}

    @property
    def url(self) -> str:
        return ",".join(f"nats://127.0.0.1:{port}" for port in self.clients)

    @property
    def monitor_urls(self) -> list[str]:
        return [f"http://127.0.0.1:{port}" for port in self._monitors]

    def store(self, index: int) -> Path:
        return self.folder / f"n{index}"

    async def start(self, index: int) -> None:
        routes = ",".join(f"nats://127.0.0.1:{port}" for port in self._routes)
        command = [
            str(find_server()),
            "-js",
            "-sd",
            str(self.store(index)),
            "-a",
            "127.0.0.1",
            "-p",
            str(self.clients[index]),
            "-m",
            str(self._monitors[index]),
        ]
        command += [f"--server_name=n{index}", "--cluster_name=fleetbus", f"--cluster=nats://127.0.0.1:{self._routes[index]}"]
        command += [f"--routes={routes}", "-l", str(self.folder / f"n{index}.log")]
        self.processes[index] = await anyio.open_process(command, stdout=None, stderr=None)

    async def kill(self, index: int) -> None:
        process = self.processes.pop(index)
        process.kill()
        await process.wait()
        await process.aclose()


@asynccontextmanager
async def cluster(folder: Path) -> AsyncIterator[Cluster]:
    made = Cluster(folder)
    try:
        for index in range(3):
            await made.start(index)
        yield made
    finally:
        with anyio.CancelScope(shield=True):
            for index in list(made.processes):
                await made.kill(index)


async def declare_streams(servers: Cluster, run: str = RUN) -> None:
    """Create the run's streams with three copies; the servers take a moment to elect a leader."""
    plan = plan_run(run, lanes=LANES, max_bytes=1 << 28, replicas=3)
    with anyio.fail_after(60):
        while True:
            with suppress(BusError, UserError):
                async with connect(servers.url, run=run, role="init") as bus:
                    with anyio.fail_after(20):
                        await bus.declare(plan)
                        return
            await anyio.sleep(0.5)


async def find_leader(servers: Cluster, run: str = RUN) -> int:
    async with connect(servers.url, run=run, role="look") as bus:
        assert isinstance(bus, NatsBus)
        info = await bus._connection.api.ask(f"STREAM.INFO.fb_{run}")
    assert info["config"]["num_replicas"] == 3
    return int(info["cluster"]["leader"].removeprefix("n"))
