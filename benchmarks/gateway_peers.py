"""``gateway.py --real-clients``: other projects' own clients against our gateways and their own servers, taking turns.

Both servers run all the time, each with as many clients connected; per round each has ``SECONDS`` of play, so that a slow
machine slows both. Figures are medians over the rounds. CPU is that of all serving processes, nats-server included. With
VAGEN's client a third server takes turns, which answers with the same bytes at once (`null_server.py`): its ratio to the
original, ``ceiling``, is what the client leaves to any server.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import msgspec

from benchmarks.gateway_servers import (
    Serving,
    free_port,
    measure_cpu,
    running,
    serve_bus_environment,
    serve_openenv,
    wait_until_answering,
)

FOLDER = Path(__file__).resolve().parent
ENVIRONMENT = "benchmarks.stepping_environment:SteppingEnvironment"
SECONDS = 1.5
WARM_SECONDS = 0.5


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """One comparison. ``kind`` names the client and the original server, ``gateway`` the command of ours."""

    name: str
    kind: str
    gateway: str
    sessions: int
    settings: dict[str, Any]


def list_cases() -> list[Case]:
    text: dict[str, Any] = {}
    pictures = {"512x512 gradient": {"size": 512}, "512x512 scene": {"size": 512, "scene": True}}
    cases = []
    for kind, gateway, shown in (("openenv", "openenv", {"text": text}), ("vagen", "gym", {"text": text} | pictures)):
        for what, settings in shown.items():
            for sessions in (1, 32):
                name = f"{kind}, {what}, {sessions} sessions"
                cases.append(Case(name=name, kind=kind, gateway=gateway, sessions=sessions, settings=settings))
    return cases


def find_python(kind: str) -> str | None:
    """The Python of ``.venv-KIND``, or the one that ``KIND_PYTHON`` names."""
    python = os.environ.get(f"{kind.upper()}_PYTHON") or FOLDER.parent / f".venv-{kind}" / "bin" / "python"
    return str(python) if Path(python).is_file() else None


@asynccontextmanager
async def serve_original(kind: str, python: str) -> AsyncIterator[tuple[str, Serving]]:
    if kind == "openenv":
        async with serve_openenv(python) as served:
            yield served
        return
    port = free_port()
    with running(str(FOLDER / "vagen_server.py"), str(port), python=python) as process:
        yield await wait_until_answering(port), {"server": process.pid}


@asynccontextmanager
async def serve_nothing(size: int) -> AsyncIterator[tuple[str, Serving]]:
    """The upper bound of servers of VAGEN's protocol."""
    port = free_port()
    with running(str(FOLDER / "null_server.py"), str(port), str(size)) as process:
        yield await wait_until_answering(port), {"server": process.pid}


class Load:
    """One process of clients, connected to one server."""

    def __init__(self, process: subprocess.Popen[str], serving: Serving) -> None:
        self._process = process
        self._serving = serving

    async def play(self, seconds: float) -> dict[str, float]:
        """Steps per second, latencies in milliseconds, and microseconds of CPU per step."""
        before = measure_cpu(self._serving)
        assert self._process.stdin is not None
        print(seconds, file=self._process.stdin, flush=True)
        told = json.loads(await self._read())
        steps, ordered = len(told["latencies"]), sorted(told["latencies"])
        spent = {name: (used - before[name]) / steps * 1e6 for name, used in measure_cpu(self._serving).items()}
        return {
            "steps_per_second": steps / told["seconds"],
            "p50_ms": ordered[steps // 2] * 1e3,
            "p99_ms": ordered[int(steps * 0.99)] * 1e3,
            "serving_cpu_us": sum(spent.values()),
            "client_cpu_us": told["cpu"] / steps * 1e6,
            **{f"{name}_cpu_us": used for name, used in spent.items() if len(spent) > 1},
        }

    async def _read(self) -> str:
        assert self._process.stdout is not None
        line = await anyio.to_thread.run_sync(self._process.stdout.readline)
        assert line, f"the clients ended with {self._process.wait(10)}"
        return line

    async def wait_until_ready(self) -> None:
        assert await self._read() == "ready\n"


@asynccontextmanager
async def load(case: Case, python: str, url: str, serving: Serving) -> AsyncIterator[Load]:
    command = [python, str(FOLDER / "client_load.py"), case.kind, url, str(case.sessions), json.dumps(case.settings)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        clients = Load(process, serving)
        await clients.wait_until_ready()
        await clients.play(WARM_SECONDS)
        yield clients
    finally:
        process.kill()
        process.wait(10)


async def compare(case: Case, python: str, rounds: int, *, in_process: bool) -> dict[str, Any]:
    async with AsyncExitStack() as stack:
        loads = {}
        ours = serve_bus_environment(case.gateway, ENVIRONMENT, in_process=in_process)
        servers = {"original": serve_original(case.kind, python), "fleetbus": ours}
        if case.kind == "vagen":
            servers["nothing"] = serve_nothing(case.settings.get("size", 0))
        for name, entered in servers.items():
            url, serving = await stack.enter_async_context(entered)
            loads[name] = await stack.enter_async_context(load(case, python, url, serving))
        played: dict[str, list[dict[str, float]]] = {name: [] for name in loads}
        for _ in range(rounds):
            for name, clients in loads.items():
                played[name].append(await clients.play(SECONDS))
    medians = {name: {key: statistics.median(one[key] for one in each) for key in each[0]} for name, each in played.items()}
    keys = ("steps_per_second", "p50_ms", "serving_cpu_us")
    ratios = {name: {key: round(_compare_rounds(played, name, key), 3) for key in keys} for name in loads if name != "original"}
    figures = {name: {key: round(value, 2) for key, value in each.items()} for name, each in medians.items()}
    return {
        "case": case.name,
        "in_process": in_process,
        "rounds": rounds,
        **figures,
        "ratio": ratios["fleetbus"],
        **({"ceiling": ratios["nothing"]} if "nothing" in ratios else {}),
        "load": round(os.getloadavg()[0], 1),
    }


def _compare_rounds(played: dict[str, list[dict[str, float]]], name: str, key: str) -> float:
    """The median of the rounds' ratios, those of ``name`` to the original's."""
    pairs = zip(played[name], played["original"], strict=True)
    return statistics.median(ours[key] / theirs[key] for ours, theirs in pairs)


async def main(rounds: int, only: str, *, in_process: bool) -> None:
    for case in list_cases():
        python = find_python(case.kind)
        if only not in case.name:
            continue
        if python is None or (case.kind == "vagen" and "VAGEN_CHECKOUT" not in os.environ):
            print(json.dumps({"case": case.name, "skipped": "run `just test-clients`; VAGEN_CHECKOUT names VAGEN's checkout"}))
            continue
        print(json.dumps(await compare(case, python, rounds, in_process=in_process)), flush=True)
