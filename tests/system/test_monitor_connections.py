"""The monitor's page where a process may open few files: who says nothing makes room for who asks."""

from __future__ import annotations

import resource

import anyio
import httpx
import pytest

from fleetbus.config.settings import Configuration, RunSettings
from fleetbus_workers.observe.monitor import serve as serving
from fleetbus_workers.replay.fixtures import memory_bus
from fleetbus_workers.serving.connections import Bounds
from fleetbus_workers.serving.listeners import bind
from fleetbus_workers.serving.protocol_choice import OTHER_FILES

PLACES = 8


async def test_the_page_answers_however_many_connections_say_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (OTHER_FILES + PLACES, OTHER_FILES + PLACES))
    monkeypatch.setattr(resource, "setrlimit", lambda *_: None)
    monkeypatch.setattr(serving, "Bounds", lambda: Bounds(head_seconds=1000))
    stop, told = anyio.Event(), anyio.Event()
    with anyio.fail_after(30), bind("127.0.0.1", 0) as bound:
        port = bound.getsockname()[1]
        async with memory_bus("run") as bus, anyio.create_task_group() as group:

            async def run() -> None:
                configuration = Configuration(run=RunSettings(name="run"))
                await serving.serve(bus, configuration, host="127.0.0.1", bound=bound, stop=stop, on_ready=lambda _: told.set())

            group.start_soon(run)
            await told.wait()
            silent = [await anyio.connect_tcp("127.0.0.1", port) for _ in range(2 * PLACES)]
            with pytest.raises((anyio.EndOfStream, anyio.BrokenResourceError)):
                await silent[0].receive()
            async with httpx.AsyncClient(trust_env=False) as client:
                assert (await client.get(f"http://127.0.0.1:{port}/api/overview")).status_code == 200
            for connection in silent:
                await connection.aclose()
            stop.set()
