"""Measures the gateways: real processes, clients over HTTP or WebSocket, an environment that answers at once.

    python benchmarks/gateway.py --json
    OPENENV_PYTHON=.venv-openenv/bin/python python benchmarks/gateway.py --json --only openenv      # after `just test-openenv`

``gym`` and ``openenv``: a nats-server, one environment worker and the gateway; text, and images of 64x64 and 512x512, another
one at every step: rendered, encoded as PNG and put into the run's object bucket by the worker, read from there by the gateway.
``service``: `GymService` around an environment class in one process, as the protocol's own server is. ``real OpenEnv server``:
that of the package `openenv`, in the same run, the same images in base64. One client per session, as those protocols have it;
clients decode no images. CPU is that of all serving processes together, nats-server included, and by process.

For comparison, the remote-gym protocol's own server on two cores of another machine (`mll-lab-nu/VAGEN` @ 2936322), steps/s
with one client and with 32, and its server's CPU per step with 32:

    text 152-236, 216-278, 0.37 ms · 64x64 124-185, 126-201, 0.52 ms · 512x512 17-21, 21-30, 5.5 ms (its client decodes them)

Where the time goes (py-spy, 32 clients, text): of the remote-gym gateway's own CPU 31 % is HTTP (h11 12, uvicorn 12, Starlette
7), 30 % the bus (25 the system calls that write to its socket), 16 % anyio's scopes and tasks, 14 % the multipart body. By
process, per step: gateway 0.62 ms, worker 0.28, nats-server 0.13 - and the clients (httpx) 1.1 ms, as much as all servers
together. A WebSocket client takes 0.08 ms and its gateway 0.14, which is why those get four times the steps. Images: at 512x512
nine tenths of the CPU are the worker's PNG encoder (zlib at Pillow's default level), as in the real OpenEnv server (7.2 ms of
CPU per step, text 0.2-0.3); bucket and gateway add 0.5 ms to a step of text. Figures of a busy machine: compare within a run.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import sys
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import anyio
import httpx
from PIL import Image
from websockets.asyncio.client import connect as connect_socket

from benchmarks.gateway_servers import Serving, measure_cpu, serve_bus_environment, serve_in_process, serve_openenv
from benchmarks.load_plan import LoadPlan, parse_plan, summarize_latencies
from fleetbus_workers.environment.adapters.remote_gym.wire import build_request_headers, decode_response, encode_request
from fleetbus_workers.gateway.gym_service import BaseGymHandler, build_gym_service

ACTION = "x" * 200
GO_ON = "0"

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


def build_gym_player(config: dict[str, Any], action: str = ACTION) -> Player:
    @asynccontextmanager
    async def player(url: str) -> AsyncIterator[Step]:
        async with httpx.AsyncClient(timeout=120) as client:

            async def call(route: str, fields: dict[str, Any]) -> dict[str, Any]:
                boundary = f"gym_env_{uuid.uuid4().hex}"
                body, headers = encode_request(fields, boundary), build_request_headers(boundary)
                response = await client.post(url + route, content=body, headers=headers)
                response.raise_for_status()
                return decode_response(response.headers["content-type"], response.content).fields

            session = (await call("/connect", {"env_config": config, "seed": secrets.randbelow(1 << 30)}))["session_id"]

            async def step() -> None:
                await call("/call", {"session_id": session, "method": "step", "params": {"action_str": action}})

            yield step
            await call("/call", {"session_id": session, "method": "close"})

    return player


def build_openenv_player(settings: dict[str, Any], action: str = ACTION) -> Player:
    @asynccontextmanager
    async def player(url: str) -> AsyncIterator[Step]:
        async with connect_socket(url.replace("http", "ws", 1) + "/ws", compression=None, max_size=None) as client:

            async def ask(kind: str, data: dict[str, Any]) -> None:
                await client.send(json.dumps({"type": kind, "data": data}))
                told = json.loads(await client.recv())
                assert told["type"] == "observation", told

            await ask("reset", {"seed": secrets.randbelow(1 << 30), **settings})

            async def step() -> None:
                await ask("step", {"text": action})

            yield step

    return player


def build_environment_settings(size: int) -> dict[str, Any]:
    """What makes the environments of the bus show images."""
    return {"id": "fleetbus/Painted-v0", "frames": True, "kwargs": {"size": size}, "modules": ["benchmarks.image_environment"]}


async def measure(plan: LoadPlan, url: str, serving: Serving, player: Player) -> dict[str, Any]:
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
        before, started, own = measure_cpu(serving), time.perf_counter(), time.process_time()
        begin.set()
    wall, steps = time.perf_counter() - started, len(latencies)
    spent = {name: seconds - before[name] for name, seconds in measure_cpu(serving).items()}
    fields = summarize_latencies(latencies, wall_seconds=wall, cpu_seconds=sum(spent.values()))
    by_process = {name: round(seconds / steps * 1e6) for name, seconds in spent.items()}
    client_us = round((time.process_time() - own) / steps * 1e6, 1)
    return {"clients": plan.sessions, **fields, "cpu_us_by_process": by_process, "client_cpu_us_per_step": client_us}


async def main(plans: list[LoadPlan], only: str) -> None:
    sizes, images = (0, 64, 512), (64, 512)
    cases: list[tuple[Any, list[tuple[str, Player]]]] = [
        (serve_bus_environment("gym", "scripted:1000000"), [("gym, text", build_gym_player({}))]),
        (
            serve_bus_environment("gym", "gym"),
            [(f"gym, {size}", build_gym_player(build_environment_settings(size), GO_ON)) for size in images],
        ),
        (serve_bus_environment("openenv", "scripted:1000000"), [("openenv, text", build_openenv_player({}))]),
        (
            serve_bus_environment("openenv", "gym"),
            [(f"openenv, {size}", build_openenv_player(build_environment_settings(size), GO_ON)) for size in images],
        ),
        (serve_in_process(), [(f"service, {size or 'text'}", build_gym_player({"size": size})) for size in sizes]),
    ]
    if python := os.environ.get("OPENENV_PYTHON"):
        players = [(f"real OpenEnv server, {size or 'text'}", build_openenv_player({"size": size})) for size in sizes]
        cases.append((serve_openenv(python), players))
    for entered, players in cases:
        wanted = [(name, player) for name, player in players if only in name]
        if not wanted:
            continue
        async with entered as (url, serving):
            for name, player in wanted:
                for plan in plans:
                    print(json.dumps({"case": name} | await measure(plan, url, serving, player)), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", default="1,32")
    parser.add_argument("--turns", default="200,30")
    parser.add_argument("--only", default="", help="cases whose name has this in it, as in 'gym' or '512'")
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--json", action="store_true", help="the output is JSON in any case")
    parser.add_argument("--real-clients", action="store_true", help="other projects' clients: our gateways, their servers")
    parser.add_argument("--separate", action="store_true", help="with --real-clients: the worker in a process of its own")
    parser.add_argument("--rounds", type=int, default=7, help="turns that each server has with --real-clients")
    options = parser.parse_args()
    if options.serve:
        serve_painter(options.serve)
    elif options.real_clients:
        from benchmarks import gateway_peers

        compare = partial(gateway_peers.main, options.rounds, options.only, in_process=not options.separate)
        anyio.run(compare, backend_options={"use_uvloop": True})
    else:
        anyio.run(main, parse_plan(options.clients, options.turns), options.only, backend_options={"use_uvloop": True})
