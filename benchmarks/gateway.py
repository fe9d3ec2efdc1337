"""How fast the gateways are: real processes, clients over HTTP or WebSocket, an environment that answers at once.

    python benchmarks/gateway.py --json

``gym``: a nats-server, one environment worker and the remote-gym gateway; text actions. ``service``: `GymService` around an
environment class in one process, as the protocol's own server is; text, and images of 64x64 and 512x512. ``openenv``: as
``gym``, over a WebSocket. One client per session, as those protocols have it; CPU is that of all serving processes together.

For comparison, the remote-gym protocol's own server on two cores of another machine (`mll-lab-nu/VAGEN` @ 2936322): text
152-236 steps/s with one client and 216-278 with 32; 64x64 124-185 and 126-201; 512x512 17-21 and 21-30 (its client decodes the
images, this one does not).
"""

from __future__ import annotations

import argparse
import json
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import anyio
import httpx
import psutil
from PIL import Image
from websockets.asyncio.client import connect as connect_socket

from benchmarks.plan import Plan, latency_fields, parse_plan, temporary_server
from fleetbus.bus.nats import connect
from fleetbus.bus.streams import plan_run
from schemas import Subjects
from workers.environment.remote_gym_wire import decode_response, encode_request, request_headers
from workers.gateway.gym_service import BaseGymHandler, build_gym_service

RUN = "gatewaybench"
ACTION = "x" * 200
START_SECONDS = 30.0

Step = Callable[[], Awaitable[None]]
Player = Callable[[str], AbstractAsyncContextManager[Step]]


class Painter(BaseGymHandler):
    """Shows an image of ``size`` pixels a side at every step; 0: none."""

    async def create_env(self, env_config: dict[str, Any]) -> Any:
        return Painting(int(env_config.get("size", 0)))


class Painting:
    def __init__(self, size: int) -> None:
        shown = [Image.linear_gradient("L").resize((size, size)).convert("RGB")] if size else []
        self._observation = {"obs_str": "<image>" if size else "text", "multi_modal_input": {"<image>": shown}}

    async def system_prompt(self) -> dict[str, Any]:
        return {"obs_str": "Look."}

    async def reset(self, seed: int) -> tuple[dict[str, Any], dict[str, Any]]:
        return self._observation, {}

    async def step(self, action: str) -> tuple[dict[str, Any], float, bool, dict[str, Any]]:
        return self._observation, 0.0, False, {}

    async def close(self) -> None:
        return


def serve_painter(port: int) -> None:
    import uvicorn

    uvicorn.run(build_gym_service(Painter()), host="127.0.0.1", port=port, log_level="warning")


@asynccontextmanager
async def on_the_bus(kind: str) -> AsyncIterator[tuple[str, tuple[int, ...]]]:
    """The address of a gateway, and the processes behind it."""
    port = free_port()
    async with temporary_server() as url, connect(url, run=RUN) as bus:
        await bus.declare(plan_run(RUN))
        common = ("--nats", url, "--run", RUN, "--log-level", "warning")
        with running("-m", "workers.cli", "environment", "--environment", "scripted:1000000", *common) as environment:
            with running("-m", "workers.cli", "gateway", kind, "--port", str(port), *common) as gateway:
                with anyio.fail_after(START_SECONDS):
                    async with bus.read([Subjects(RUN).life("*", "*")]) as reader:
                        for _ in range(2):
                            await reader.receive()
                yield f"http://127.0.0.1:{port}", (environment.pid, gateway.pid)


@asynccontextmanager
async def in_one_process() -> AsyncIterator[tuple[str, tuple[int, ...]]]:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with running(__file__, "--serve", str(port)) as process:
        with anyio.fail_after(START_SECONDS):
            async with httpx.AsyncClient() as client:
                while True:
                    try:
                        await client.get(f"{url}/health")
                        break
                    except httpx.TransportError:
                        await anyio.sleep(0.1)
        yield url, (process.pid,)


class running:
    """A process of this Python for the length of a block."""

    def __init__(self, *arguments: str) -> None:
        self._process = subprocess.Popen([sys.executable, *arguments])

    def __enter__(self) -> subprocess.Popen[bytes]:
        return self._process

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait(30)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def gym_player(config: dict[str, Any]) -> Player:
    @asynccontextmanager
    async def player(url: str) -> AsyncIterator[Step]:
        async with httpx.AsyncClient(timeout=120) as client:

            async def call(route: str, fields: dict[str, Any]) -> dict[str, Any]:
                boundary = f"gym_env_{uuid.uuid4().hex}"
                body, headers = encode_request(fields, boundary), request_headers(boundary)
                response = await client.post(url + route, content=body, headers=headers)
                response.raise_for_status()
                return decode_response(response.headers["content-type"], response.content).fields

            session = (await call("/connect", {"env_config": config, "seed": 1}))["session_id"]

            async def step() -> None:
                await call("/call", {"session_id": session, "method": "step", "params": {"action_str": ACTION}})

            yield step
            await call("/call", {"session_id": session, "method": "close"})

    return player


@asynccontextmanager
async def openenv_player(url: str) -> AsyncIterator[Step]:
    async with connect_socket(url.replace("http", "ws", 1) + "/ws", compression=None) as client:

        async def ask(kind: str, data: dict[str, Any]) -> None:
            await client.send(json.dumps({"type": kind, "data": data}))
            told = json.loads(await client.recv())
            assert told["type"] == "observation", told

        await ask("reset", {"seed": 1})

        async def step() -> None:
            await ask("step", {"text": ACTION})

        yield step


async def measured(plan: Plan, url: str, processes: tuple[int, ...], player: Player) -> dict[str, Any]:
    """All sessions at once, after each has made one step."""
    latencies: list[float] = []
    begin, everybody = anyio.Event(), anyio.Event()
    ready = 0

    async def play() -> None:
        nonlocal ready
        async with player(url) as step:
            await step()
            ready += 1
            if ready == plan.sessions:
                everybody.set()
            await begin.wait()
            for _ in range(plan.turns):
                started = time.perf_counter()
                await step()
                latencies.append(time.perf_counter() - started)

    async with anyio.create_task_group() as group:
        for _ in range(plan.sessions):
            group.start_soon(play)
        await everybody.wait()
        before, started, own = cpu_of(processes), time.perf_counter(), time.process_time()
        begin.set()
    wall = time.perf_counter() - started
    fields = latency_fields(latencies, wall_seconds=wall, cpu_seconds=cpu_of(processes) - before)
    client_us = (time.process_time() - own) / len(latencies) * 1e6
    return {"clients": plan.sessions, **fields, "client_cpu_us_per_step": round(client_us, 1)}


def cpu_of(processes: tuple[int, ...]) -> float:
    times = [psutil.Process(process).cpu_times() for process in processes]
    return sum(each.user + each.system for each in times)


async def main(plans: list[Plan]) -> None:
    gym, openenv, service = on_the_bus("gym"), on_the_bus("openenv"), in_one_process()
    cases: list[tuple[Any, list[tuple[str, Player]]]] = [
        (gym, [("gym, text", gym_player({}))]),
        (openenv, [("openenv, text", openenv_player)]),
        (service, [(f"service, {size or 'text'}", gym_player({"size": size})) for size in (0, 64, 512)]),
    ]
    for entered, players in cases:
        async with entered as (url, processes):
            for name, player in players:
                for plan in plans:
                    print(json.dumps({"case": name} | await measured(plan, url, processes, player)), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", default="1,32")
    parser.add_argument("--turns", default="200,30")
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--json", action="store_true", help="the output is JSON in any case")
    options = parser.parse_args()
    if options.serve:
        serve_painter(options.serve)
    else:
        anyio.run(main, parse_plan(options.clients, options.turns), backend_options={"use_uvloop": True})
