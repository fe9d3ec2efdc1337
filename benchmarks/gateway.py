"""How fast the remote-gym gateway is: a real server, one environment worker and the gateway as processes, clients over HTTP.

    python benchmarks/gateway.py --json

Text actions on an environment that answers at once, one httpx client per session as the protocol's own client has it. CPU is
that of gateway and environment worker together. For comparison: the protocol's own server did 152-236 steps/s with one client and
216-278 with 32, on two cores of another machine (its code as of 2026-07-23, `mll-lab-nu/VAGEN` @ 2936322).
"""

from __future__ import annotations

import argparse
import json
import socket
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import anyio
import httpx
import psutil

from benchmarks.plan import Plan, latency_fields, parse_plan, temporary_server
from fleetbus.bus.nats import connect
from fleetbus.bus.streams import plan_run
from schemas import Subjects
from workers.environment.remote_gym_wire import decode_response, encode_request, request_headers

RUN = "gatewaybench"
START_SECONDS = 30.0


async def main(plans: list[Plan]) -> None:
    port = free_port()
    async with temporary_server() as url, connect(url, run=RUN) as bus:
        await bus.declare(plan_run(RUN))
        common = ("--nats", url, "--run", RUN, "--log-level", "warning")
        environment = start("environment", "--environment", "scripted:1000000", *common)
        gateway = start("gateway", "gym", "--port", str(port), *common)
        try:
            with anyio.fail_after(START_SECONDS):
                async with bus.read([Subjects(RUN).life("*", "*")]) as reader:
                    for _ in range(2):
                        await reader.receive()
            for plan in plans:
                print(json.dumps(await measured(plan, f"http://127.0.0.1:{port}", (environment.pid, gateway.pid))), flush=True)
        finally:
            for process in (gateway, environment):
                process.terminate()
            for process in (gateway, environment):
                process.wait(30)


def start(*command: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-m", "workers.cli", *command])


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def measured(plan: Plan, url: str, processes: tuple[int, ...]) -> dict[str, Any]:
    """All sessions at once, after each has made one step."""
    latencies: list[float] = []
    begin, ready = anyio.Event(), 0
    everybody = anyio.Event()

    async def play() -> None:
        nonlocal ready
        async with httpx.AsyncClient(timeout=120) as client:
            opened = await call(client, f"{url}/connect", {"env_config": {}, "seed": 1})
            step = {"session_id": opened["session_id"], "method": "step", "params": {"action_str": "x" * 200}}
            await call(client, f"{url}/call", step)
            ready += 1
            if ready == plan.sessions:
                everybody.set()
            await begin.wait()
            for _ in range(plan.turns):
                started = time.perf_counter()
                await call(client, f"{url}/call", step)
                latencies.append(time.perf_counter() - started)
            await call(client, f"{url}/call", {"session_id": opened["session_id"], "method": "close"})

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


async def call(client: httpx.AsyncClient, url: str, fields: dict[str, Any]) -> dict[str, Any]:
    boundary = f"gym_env_{uuid.uuid4().hex}"
    response = await client.post(url, content=encode_request(fields, boundary), headers=request_headers(boundary))
    response.raise_for_status()
    return decode_response(response.headers["content-type"], response.content).fields


def cpu_of(processes: tuple[int, ...]) -> float:
    times = [psutil.Process(process).cpu_times() for process in processes]
    return sum(each.user + each.system for each in times)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", default="1,32")
    parser.add_argument("--turns", default="300,60")
    parser.add_argument("--json", action="store_true", help="the output is JSON in any case")
    options = parser.parse_args()
    anyio.run(main, parse_plan(options.clients, options.turns), backend_options={"use_uvloop": True})
