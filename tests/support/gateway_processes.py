"""Gateways and environment workers as processes of one run on a real server, to be killed."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import httpx

from fleetbus.bus.base import Bus
from fleetbus.bus.streams import plan_run
from fleetbus_schemas import Subjects
from tests.support.gym_service import Wire, new_boundary
from tests.support.servers import connect, run_server

RUN = "gateway"
SUBJECTS = Subjects(RUN)


class ProcessDeployment:
    """Processes of one run, killed at the end whatever happened. ``bus`` is an admin's, ``operator`` an operator's."""

    def __init__(self, url: str, bus: Bus, operator: Bus) -> None:
        self.url = url
        self.bus = bus
        self.operator = operator
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    async def start(self, name: str, *command: str) -> None:
        """A role's process; returns when its heart beats."""
        async with self.bus.listen(SUBJECTS.heartbeat("*", name)) as heartbeats:
            arguments = [*command, "--nats", self.url, "--run", RUN, "--name", name]
            self.processes[name] = subprocess.Popen([sys.executable, "-m", "fleetbus_workers.cli", *arguments])  # noqa: ASYNC220
            await heartbeats.receive()

    def kill(self, name: str) -> None:
        process = self.processes.pop(name)
        process.send_signal(signal.SIGKILL)
        process.wait(10)

    def kill_all(self) -> None:
        for name in list(self.processes):
            self.kill(name)


@asynccontextmanager
async def start_processes(folder: Path, *, seconds: float = 55) -> AsyncIterator[ProcessDeployment]:
    async with run_server(folder, monitor_port=None) as server, connect(server.url, run=RUN) as bus:
        await bus.declare(plan_run(RUN))
        async with connect(server.url, run=RUN, role="operator") as operator:
            fleet = ProcessDeployment(server.url, bus, operator)
            try:
                with anyio.fail_after(seconds):
                    yield fleet
            finally:
                fleet.kill_all()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def repeat_until_answered(wire: Wire, session: str, action: str, *, boundary: str = "") -> dict[str, Any]:
    """One step, repeated under its boundary while nobody answers, as the protocol's clients do."""
    boundary = boundary or new_boundary()
    while True:
        try:
            return await wire.call(session, "step", boundary=boundary, action_str=action)
        except httpx.TransportError:
            await anyio.sleep(0.1)
