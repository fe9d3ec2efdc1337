"""The disk under the server is full: workers, `top`, metrics, the page and `doctor` say so alike, and what to do; with room and
after a restart of the server the run goes on. Needs root, for a file system of a few megabytes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from itertools import count
from pathlib import Path

import anyio
import httpx
import pytest

from fleetbus.bus.base import STORES_NOTHING, Bus
from fleetbus.bus.nats import connect
from fleetbus.bus.nats.server import NatsServerProcess, run_server
from fleetbus.bus.streams import plan_run
from fleetbus.config.settings import Configuration, EnvironmentSettings, InferenceSettings, RunSettings
from fleetbus.errors import PublishUnanswered
from fleetbus_schemas import EpisodeRequested, Heartbeat, PolicyPublished, Subjects, Task, decode, encode
from fleetbus_workers.environment.adapters.scripted import ScriptedEnvironment
from fleetbus_workers.environment.worker import run_environment
from fleetbus_workers.inference.scripted import ScriptedSampler, ScriptedTemplate
from fleetbus_workers.inference.worker import run_inference
from fleetbus_workers.observe.metrics.collect import collect
from fleetbus_workers.observe.metrics.run_view import RunView
from fleetbus_workers.observe.run.run_observer import RunObserver
from fleetbus_workers.observe.run.state import RunState
from fleetbus_workers.observe.run.watchdog import DISK_ADVICE, find_stalls
from tests.support.monitor_page import Page, serve_run_page

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

RUN = "disk"
S = Subjects(RUN)
DISK_MIB = 24
LOG_BYTES = 16 << 20
"""The server reserves it, three quarters of the disk at most."""

SETTINGS = Configuration(
    run=RunSettings(name=RUN), environment=EnvironmentSettings(slots=4), inference=InferenceSettings(slots=8)
)


@contextmanager
def small_disk(folder: Path) -> Iterator[None]:
    folder.mkdir()
    options = ["mount", "-t", "tmpfs", "-o", f"size={DISK_MIB}m", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(options, check=False, capture_output=True).returncode:
        pytest.skip("this user may mount no file system")
    try:
        yield
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def fill(folder: Path) -> None:
    """Until nothing fits."""
    with (folder / "filler").open("wb", buffering=0) as filler:
        try:
            while True:
                filler.write(bytes(4096))
        except OSError:
            return


async def request(bus: Bus, number: int) -> None:
    message = EpisodeRequested(
        episode_id=f"e{number}", group_id=f"e{number}", sample_index=0, split="eval", task=Task(key="t", config={"turns": 500}),
        policy="default", max_turns=500, max_tokens=1 << 20, deadline_ns=bus.now_ns() + 600 * 10**9,
    )  # fmt: skip
    await bus.publish(S.task("default", f"e{number}"), encode(message), expected_last=0)


@asynccontextmanager
async def workers(url: str) -> AsyncIterator[None]:
    """One of each role, in this process, and an episode that lasts."""
    async with (
        connect(url, run=RUN, role="environment", worker="environment-1") as near,
        connect(url, run=RUN, role="inference", worker="inference-1") as far,
        anyio.create_task_group() as tasks,
    ):

        async def infer() -> None:
            sampler, drain = ScriptedSampler(delay=lambda _: 0.05), anyio.Event()
            await run_inference(
                far, configuration=SETTINGS, name="inference-1", drain=drain, sampler=sampler, template=ScriptedTemplate()
            )

        async def step() -> None:
            drain = anyio.Event()
            await run_environment(near, configuration=SETTINGS, name="environment-1", drain=drain, make=ScriptedEnvironment)

        tasks.start_soon(infer)
        tasks.start_soon(step)
        yield
        tasks.cancel_scope.cancel()


async def command(*words: str) -> str:
    with anyio.fail_after(90):
        ended = await anyio.run_process([sys.executable, "-m", "fleetbus", *words], check=False, stderr=subprocess.STDOUT)
    return ended.stdout.decode()


async def ask_views(bus: Bus, server: NatsServerProcess, nats_http: str) -> dict[str, str]:
    """What each view says is wrong, by its name; ``nats_http`` empty: as where the server's own endpoints are not known."""
    where = ["--nats", server.url, "--nats-http", nats_http] if nats_http else ["--nats", server.url]
    top = json.loads((await command("top", RUN, "--once", "--json", *where)).splitlines()[-1])
    doctor = (await command("doctor", "--run", RUN, *where)).splitlines()
    async with serve_run_page(bus, SETTINGS, nats_http) as address, httpx.AsyncClient(base_url=address) as client:
        page = Page(address, client)
        with anyio.fail_after(30):
            while not (on_page := (await page.get("/api/overview"))["stalls"]):  # noqa: ASYNC110  # another task's
                await anyio.sleep(0.2)
    return {
        "top": "; ".join(stall[part] for stall in top["stalls"] for part in ("reason", "advice")),
        "doctor": "; ".join(line for line in doctor if line.startswith(("FAIL", "warn")) and DISK_ADVICE in line),
        "page": "; ".join(stall["line"] for stall in on_page),
    }


async def read_stall_metrics(bus: Bus, nats_http: str) -> list[str]:
    """Where the run stalls, by the metrics."""
    async with anyio.create_task_group() as tasks:
        watch = RunObserver(bus, S, RunState(0))
        tasks.start_soon(watch.run)
        with anyio.fail_after(30):
            while True:
                await anyio.sleep(0.5)
                server = await watch.fetch_server_view(lambda: nats_http)
                now, now_ns = anyio.current_time(), bus.now_ns()
                stalls = find_stalls(watch.state, watch.health, now=now, now_ns=now_ns) if watch.may_be_stuck(now) else []
                samples = collect(RunView(watch.state, watch.health, server, stalls, now, now_ns))
                if found := [sample.labels[0] for sample in samples if sample.name == "fleetbus_stalled"]:
                    tasks.cancel_scope.cancel()
                    return found
    raise AssertionError


async def until_refused(bus: Bus) -> None:
    """Store until the server does not answer any more."""
    for number in count():
        try:
            await bus.publish(S.episode(f"x{number}"), b"x" * 50_000, timeout=5)
        except PublishUnanswered:
            return


async def test_all_views_name_the_disk_and_the_run_goes_on_after_a_restart(tmp_path: Path) -> None:
    folder = tmp_path / "nats"
    with small_disk(folder):
        async with run_server(folder) as server, connect(server.url, run=RUN, role="init", worker="init") as bus:
            await bus.declare(plan_run(RUN, lanes=2, max_bytes=LOG_BYTES))
            policy = PolicyPublished(policy="default", version=0, lineage="l1", step=0, uri="", manifest=(), size_bytes=0)
            await bus.publish(S.policy("default"), encode(policy))
            async with workers(server.url):
                await request(bus, 1)
                await bus.next_entry(S.action("e0", "e1"), start=1)
                await anyio.to_thread.run_sync(fill, folder)
                await until_refused(bus)
                told = await ask_views(bus, server, str(server.monitor_url))
                print(told)
                assert all("no space left on device" in words and DISK_ADVICE in words for words in told.values())
                assert await read_stall_metrics(bus, str(server.monitor_url)) == ["log"]
                await until_told(bus)
                told = await ask_views(bus, server, "")
                print(told)
                assert all(STORES_NOTHING in words and DISK_ADVICE in words for words in told.values())
                (folder / "filler").unlink()
                with pytest.raises(PublishUnanswered, match="stores nothing"):
                    await bus.publish(S.episode("y"), b"room is not enough", timeout=12)
                await server.stop()
                await server.restart()
                stored = (await bus.publish(S.episode("z"), b"it stores again", timeout=60)).sequence
                with anyio.fail_after(60):
                    await bus.next_entry(S.action("e0", "e1"), start=stored)


async def until_told(bus: Bus) -> None:
    """Until a worker's heartbeat says so."""
    with anyio.fail_after(90):
        async with bus.listen(S.heartbeats) as listener:
            while decode(Heartbeat, (await listener.receive())[1], subject="").problem != STORES_NOTHING:
                pass
