"""``fleetbus top``, the page and the metrics on a run that ended or that was resumed, on a real server."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest
from anyio import to_thread

from fleetbus.bus.base import Bus
from fleetbus.bus.memory import MemoryServer
from fleetbus.bus.streams import plan_run
from fleetbus.config.load import dump_configuration, load_configuration
from fleetbus.config.run_folder import RunFolder
from fleetbus_schemas import LineageStarted, StepTrained, Subjects, WorkerStarted, WorkerStopped, encode
from fleetbus_workers.cli.program import run_program
from fleetbus_workers.observe.run import run_observer
from fleetbus_workers.observe.run.run_observer import RunObserver
from fleetbus_workers.observe.run.state import RunState
from fleetbus_workers.observe.run.termination import Driver
from fleetbus_workers.run_access.log_access import build_driver
from fleetbus_workers.run_access.sources import build_address_resolver
from fleetbus_workers.up.lock import lock_run
from tests.support.servers import connect, needs_only_copy, run_server

pytestmark = pytest.mark.integration

RUN = "ended"
SUBJECTS = Subjects(RUN)


async def stop_in_order(bus: Bus, subjects: Subjects) -> None:
    """Store what a run of one step that was stopped in order leaves."""
    train, life = subjects.train("default"), subjects.life("learner", "lea")
    for subject, message in (
        (life, WorkerStarted(role="learner", worker="lea")),
        (train, LineageStarted(lineage="a", worker="lea")),
        (train, StepTrained(lineage="a", step=1, version=1, episodes=("e",))),
        (life, WorkerStopped(role="learner", worker="lea")),
    ):
        await bus.publish(subject, encode(message))


@pytest.fixture
async def folder(tmp_path: Path) -> RunFolder:
    """The files of a run of `up` that was stopped in order."""
    folder = RunFolder(tmp_path / "runs" / RUN)
    async with run_server(folder.store) as server, connect(server.url, run=RUN, role="test") as bus:
        await bus.declare(plan_run(RUN, lanes=1, max_bytes=0))
        await stop_in_order(bus, SUBJECTS)
    configuration = load_configuration(flags={"run.name": RUN, "run.folder": str(tmp_path / "runs")}).configuration
    folder.configuration.write_bytes(dump_configuration(configuration))
    folder.lock.write_text("1")
    return folder


@needs_only_copy
async def test_top_says_of_a_stopped_run_that_it_is_over_and_how_it_goes_on(folder: RunFolder, capsys: Any) -> None:
    arguments = ["top", RUN, "--run-folder", str(folder.path.parent), "--once", "--stall", "0.001"]
    with anyio.fail_after(50):
        assert await to_thread.run_sync(run_program, arguments) == 0
        shown = " ".join(capsys.readouterr().out.split())
        assert "over, step 1" in shown and "over: it was stopped normally" in shown and "stuck" not in shown
        assert await to_thread.run_sync(run_program, [*arguments, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["ending"]["how"] == "stopped" and facts["stalls"] == []
    assert facts["ending"]["line"].endswith(f"`fleetbus up --run {RUN} --run-folder {folder.path.parent}` resumes it")


async def test_a_run_that_up_drives_may_go_on_and_one_that_others_serve_too(folder: RunFolder) -> None:
    flags = {"run.name": RUN, "run.folder": str(folder.path.parent)}
    here = load_configuration(flags=flags).configuration
    assert build_driver(here).is_driving() is False
    folder.server.write_text(json.dumps({"url": "nats://127.0.0.1:1", "pid": 1}))
    assert build_driver(here).is_driving() is False, "an `up` that was killed leaves the address behind"
    with lock_run(folder.lock, RUN):
        assert build_driver(here).is_driving() is True
    there = load_configuration(flags=flags | {"nats.url": "nats://127.0.0.1:1"}).configuration
    assert build_driver(there).is_driving() is None


async def test_a_resumed_run_is_asked_at_the_address_of_its_running_server(folder: RunFolder) -> None:
    here = load_configuration(flags={"run.name": RUN, "run.folder": str(folder.path.parent)}).configuration
    address = build_address_resolver(here, "")
    assert address() is None
    for port in (1111, 2222):
        monitor = f"http://127.0.0.1:{port}"
        folder.server.write_text(json.dumps({"url": "nats://127.0.0.1:1", "pid": 1, "monitor": monitor}))
        with lock_run(folder.lock, RUN):
            assert address() == monitor
        assert address() is None, "an `up` that was killed leaves the address behind"


async def test_whoever_watches_asks_for_the_address_every_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_observer, "LOOK_SECONDS", 0.01)
    with anyio.fail_after(50):
        async with run_server(tmp_path) as server, connect(server.url, run=RUN, role="test") as bus:
            await bus.declare(plan_run(RUN, lanes=1, max_bytes=0))
            addresses = ["", str(server.monitor_url)]
            watch = RunObserver(bus, SUBJECTS, RunState(1))
            known = anyio.Event()

            def address() -> str:
                if watch.server.version:
                    known.set()
                return addresses.pop(0) if len(addresses) > 1 else addresses[0]

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(watch.follow_server_view, address)
                await known.wait()
                tasks.cancel_scope.cancel()


@asynccontextmanager
async def page_of_an_ended_run() -> AsyncIterator[Any]:
    pytest.importorskip("starlette")
    pytest.importorskip("uvicorn")
    from tests.support.monitor_page import open_page
    from tests.support.small_deployment import RUN as SMALL

    memory = MemoryServer()
    driver = Driver(is_driving=lambda: False, command="fleetbus up")
    with anyio.fail_after(50):
        async with memory.connect(SMALL, worker="test") as bus:
            await bus.declare(plan_run(SMALL, lanes=2))
            await stop_in_order(bus, Subjects(SMALL))
            async with open_page(bus, driver=driver) as page:
                yield page


async def test_the_page_says_of_a_run_that_it_is_over() -> None:
    async with page_of_an_ended_run() as page, page.events() as events:
        facts = await anext(facts async for name, facts in events if name == "overview" and facts["ending"])
    assert facts["ending"]["how"] == "stopped" and facts["stalls"] == []
    assert facts["ending"]["line"].endswith("`fleetbus up` resumes it")


async def test_the_page_says_at_once_of_an_ended_run_whose_server_is_gone_that_nobody_serves_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    look = RunObserver._poll_usage

    async def in_vain(watch: RunObserver) -> None:
        with anyio.move_on_after(0.2):
            await look(watch)
        watch.health.record_failure("the NATS server does not answer", anyio.current_time())

    monkeypatch.setattr(RunObserver, "_poll_usage", in_vain)
    async with page_of_an_ended_run() as page, page.events() as events:
        facts = await anext(facts async for name, facts in events if name == "overview" and facts["log"]["problem"])
        while not facts["ending"]:
            facts = await anext(facts async for name, facts in events if name == "overview")
        answer = await page.client.get("/api/episodes/e")
    assert facts["stalls"] == []
    assert answer.status_code == 503 and "its log is no longer served" in answer.text


@needs_only_copy
async def test_the_metrics_of_a_stopped_run_say_that_it_is_over(folder: RunFolder) -> None:
    pytest.importorskip("prometheus_client")
    command = [
        sys.executable,
        "-m",
        "fleetbus_workers.cli",
        "metrics",
        RUN,
        "--run-folder",
        str(folder.path.parent),
        "--port",
        "0",
    ]
    with anyio.fail_after(50):
        async with await anyio.open_process(command, stderr=subprocess.DEVNULL) as metrics, httpx.AsyncClient() as client:
            assert metrics.stdout is not None
            address = (await metrics.stdout.receive()).decode().split()[-1]
            while "fleetbus_over{" not in (samples := (await client.get(address)).text):  # noqa: ASYNC110  # another process
                await anyio.sleep(0.1)
            metrics.terminate()
    assert f'fleetbus_over{{how="stopped",run="{RUN}"}} 1.0' in samples and "fleetbus_stalled{" not in samples
