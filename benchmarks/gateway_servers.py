"""The servers that `gateway.py` and `gateway_peers.py` compare, as processes, and the CPU that they take."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path

import anyio
import httpx
import psutil

from benchmarks.load_plan import temporary_server
from fleetbus.bus.nats import connect
from fleetbus.bus.streams import plan_run
from fleetbus_schemas import Subjects

ROOT = Path(__file__).resolve().parent.parent
RUN = "gatewaybench"
START_SECONDS = 90.0
END_SECONDS = 5.0

Serving = dict[str, int]
"""Process ids by name."""


@asynccontextmanager
async def serve_bus_environment(kind: str, environment: str, *, in_process: bool = False) -> AsyncIterator[tuple[str, Serving]]:
    """The address of a gateway, and the processes behind it; ``in_process``: the gateway runs the environments itself."""
    port = free_port()
    async with temporary_server() as url, connect(url, run=RUN) as bus:
        await bus.declare(plan_run(RUN))
        (server,) = (child for child in psutil.Process().children() if "nats-server" in child.name())
        common = ["--nats", url, "--run", RUN, "--log-level", "warning", "--environment", environment, "--environment-images"]
        common += ["--environment-task-modules", "benchmarks.image_environment"]
        serve = ("gateway", kind, "--port", str(port), *(["--in-process"] if in_process else []))
        with ExitStack() as stack:
            serving = {"nats": server.pid}
            for name, command in ({"gateway": serve} | ({} if in_process else {"environment": ("environment",)})).items():
                started = running("-m", "fleetbus_workers.cli", *command, *common)
                serving[name] = stack.enter_context(started).pid
            with anyio.fail_after(START_SECONDS):
                async with bus.listen(Subjects(RUN).heartbeats) as heartbeats:
                    heard: set[str] = set()
                    while len(heard) < 2:
                        heard.add((await heartbeats.receive())[0])
            yield f"http://127.0.0.1:{port}", serving


@asynccontextmanager
async def serve_openenv(python: str) -> AsyncIterator[tuple[str, Serving]]:
    """The real OpenEnv server."""
    port = free_port()
    with running(str(Path(__file__).with_name("openenv_image_server.py")), str(port), python=python) as process:
        yield await wait_until_answering(port), {"server": process.pid}


@asynccontextmanager
async def serve_in_process() -> AsyncIterator[tuple[str, Serving]]:
    """`GymService` around a class."""
    port = free_port()
    with running(str(Path(__file__).with_name("gateway.py")), "--serve", str(port)) as process:
        yield await wait_until_answering(port), {"service": process.pid}


async def wait_until_answering(port: int) -> str:
    """The address of a server, once it answers."""
    url = f"http://127.0.0.1:{port}"
    with anyio.fail_after(START_SECONDS):
        async with httpx.AsyncClient() as client:
            while True:
                try:
                    await client.get(f"{url}/health")
                    return url
                except httpx.TransportError:
                    await anyio.sleep(0.1)


class running:
    """A process of this Python, or another one, for the length of a block."""

    def __init__(self, *arguments: str, python: str = sys.executable) -> None:
        self._process = subprocess.Popen([python, *arguments], cwd=ROOT)

    def __enter__(self) -> subprocess.Popen[bytes]:
        return self._process

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        try:
            self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:  # a worker drains for a minute while its clients' sessions are open
            self._process.kill()
            self._process.wait()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def measure_cpu(serving: Serving) -> dict[str, float]:
    """Seconds of CPU by process, those that it started included."""
    times = {name: psutil.Process(process).cpu_times() for name, process in serving.items()}
    return {name: each.user + each.system for name, each in times.items()}
