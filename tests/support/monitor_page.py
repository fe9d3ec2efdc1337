"""The monitor's page of a run, served in this process, and a client of it. Needs starlette and uvicorn."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import httpx

from fleetbus.bus.base import Bus
from fleetbus.bus.memory import MemoryServer
from fleetbus.bus.streams import plan_run
from fleetbus.config.settings import Configuration, RunSettings
from fleetbus_workers.observe.monitor.actions import OpenBus
from fleetbus_workers.observe.monitor.compared_evaluations import OpenRun
from fleetbus_workers.observe.monitor.serve import serve
from fleetbus_workers.observe.run.termination import Driver
from fleetbus_workers.serving.listeners import bind
from tests.support.small_deployment import RUN


class Page:
    """The served page of one run."""

    def __init__(self, address: str, client: httpx.AsyncClient) -> None:
        self.address = address
        self.client = client

    async def get(self, path: str, **query: Any) -> Any:
        answer = await self.client.get(path, params=query)
        assert answer.status_code == 200, answer.text
        return answer.json()

    @asynccontextmanager
    async def events(self) -> AsyncIterator[AsyncIterator[tuple[str, Any]]]:
        async with self.client.stream("GET", "/api/events", timeout=30) as answer:
            assert answer.headers["content-type"].startswith("text/event-stream")
            yield _events(answer)


async def _events(answer: httpx.Response) -> AsyncIterator[tuple[str, Any]]:
    name = ""
    async for line in answer.aiter_lines():
        if line.startswith("event: "):
            name = line.removeprefix("event: ")
        elif line.startswith("data: "):
            yield name, json.loads(line.removeprefix("data: "))


@asynccontextmanager
async def serve_run_page(
    bus: Bus,
    configuration: Configuration,
    nats_http: str | None = None,
    driver: Driver | None = None,
    key: str = "",
    open_operator: OpenBus | None = None,
    open_other: OpenRun | None = None,
) -> AsyncIterator[str]:
    """The address of the page on a run, for the length of the block."""
    stop, on_ready = anyio.Event(), anyio.Event()
    addresses: list[str] = []

    def tell(address: str) -> None:
        addresses.append(address)
        on_ready.set()

    with bind("127.0.0.1", 0) as bound:
        async with anyio.create_task_group() as tasks:

            async def run() -> None:
                await serve(
                    bus,
                    configuration,
                    host="127.0.0.1",
                    bound=bound,
                    stop=stop,
                    on_ready=tell,
                    nats_http=lambda: nats_http,
                    driver=driver,
                    key=key,
                    open_operator=open_operator,
                    open_other=open_other,
                )

            tasks.start_soon(run)
            await on_ready.wait()
            yield addresses[0]
            stop.set()


@asynccontextmanager
async def open_page(
    bus: Bus, nats_http: str | None = None, driver: Driver | None = None, folder: str = RunSettings().folder
) -> AsyncIterator[Page]:
    async with serve_run_page(bus, Configuration(run=RunSettings(name=RUN, folder=folder)), nats_http, driver) as address:
        async with httpx.AsyncClient(base_url=address, timeout=30, trust_env=False) as client:
            yield Page(address, client)


@asynccontextmanager
async def open_empty_run(folder: str = RunSettings().folder) -> AsyncIterator[tuple[Page, Bus]]:
    server = MemoryServer()
    async with server.connect(RUN, worker="test") as bus:
        await bus.declare(plan_run(RUN, lanes=2))
        async with server.connect(RUN, worker="monitor") as watching, open_page(watching, folder=folder) as page:
            yield page, bus
