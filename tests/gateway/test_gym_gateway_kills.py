"""On a real server the worker of a session, then the gateway, are killed in mid-episode; the client's episode goes on."""

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
import pytest

from fleetbus.bus.base import Bus
from fleetbus.bus.nats import connect
from fleetbus.bus.nats.server import run_server
from fleetbus.bus.streams import plan_run
from schemas import Subjects, WorkerStarted
from schemas.message import decode_any
from tests.gateway.test_gym_gateway import Wire, new_boundary
from workers.environment.stepwise.journal import journal_of

RUN = "gateway"
SUBJECTS = Subjects(RUN)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class Fleet:
    """Processes of one run; killed at the end whatever happened."""

    def __init__(self, url: str, bus: Bus) -> None:
        self._url = url
        self.bus = bus
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    async def start(self, name: str, *command: str) -> None:
        """A role's process; returns when it has said hello."""
        async with self.bus.read([SUBJECTS.life("*", name)], start=await self.bus.last_sequence() + 1) as reader:
            arguments = [*command, "--nats", self._url, "--run", RUN, "--name", name]
            self.processes[name] = subprocess.Popen([sys.executable, "-m", "workers.cli", *arguments])  # noqa: ASYNC220
            while True:
                entry = await reader.receive()
                try:
                    decode_any((WorkerStarted,), entry.payload)
                except ValueError:
                    continue
                return

    def kill(self, name: str) -> None:
        process = self.processes.pop(name)
        process.send_signal(signal.SIGKILL)
        process.wait(10)

    def kill_all(self) -> None:
        for name in list(self.processes):
            self.kill(name)


@asynccontextmanager
async def fleet_on(folder: Path, *, seconds: float = 55) -> AsyncIterator[Fleet]:
    async with run_server(folder, monitor_port=None) as server, connect(server.url, run=RUN) as bus:
        await bus.declare(plan_run(RUN))
        fleet = Fleet(server.url, bus)
        try:
            with anyio.fail_after(seconds):
                yield fleet
        finally:
            fleet.kill_all()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def answered(wire: Wire, session: str, action: str, *, boundary: str = "") -> dict[str, Any]:
    """One step, repeated under its boundary while nobody answers, as the protocol's clients do."""
    boundary = boundary or new_boundary()
    while True:
        try:
            return await wire.call(session, "step", boundary=boundary, action_str=action)
        except httpx.TransportError:
            await anyio.sleep(0.1)


async def test_a_killed_worker_and_a_killed_gateway_change_nothing_for_the_client(tmp_path: Path) -> None:
    async with fleet_on(tmp_path) as fleet, httpx.AsyncClient() as client:
        port = str(free_port())
        await fleet.start("g1", "gateway", "gym", "--port", port)
        for name in ("e1", "e2"):
            await fleet.start(name, "environment", "--environment", "scripted:5")
        wire = Wire(client, f"http://127.0.0.1:{port}")
        session = (await wire.connect())["session_id"]
        assert (await answered(wire, session, "one"))["obs"] == "turn 1"

        holder = (await journal_of(fleet.bus, SUBJECTS, session)).claim
        assert holder is not None
        fleet.kill(holder.worker)
        assert (await answered(wire, session, "two"))["obs"] == "turn 2"

        boundary = new_boundary()
        third = await answered(wire, session, "three", boundary=boundary)
        fleet.kill("g1")
        await fleet.start("g2", "gateway", "gym", "--port", port)
        assert await answered(wire, session, "three", boundary=boundary) == third

        assert (await answered(wire, session, "four"))["done"] is False
        last = await answered(wire, session, "five")
        assert (last["done"], last["reward"]) == (True, 1.0)
        journal = await journal_of(fleet.bus, SUBJECTS, session)
        steps = [record.call.text for record in journal.records if record.call.call == "step"]
        assert steps == ["one", "two", "three", "four", "five"]
