"""Connections to one server of a test: the one in memory, or a real nats-server."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

from fleetbus.bus.base import Bus
from fleetbus.bus.memory import MemoryServer
from tests.support.servers import connect, run_server

Connect = Callable[[str], AbstractAsyncContextManager[Bus]]
"""Connects the worker of that name."""


@asynccontextmanager
async def connections_to(kind: str, run: str, folder: Path) -> AsyncIterator[Connect]:
    """``kind`` is "memory" or "nats", which keeps its store in ``folder``."""
    if kind == "memory":
        server = MemoryServer()
        yield lambda worker: server.connect(run, worker=worker)
        return
    async with run_server(folder / "nats") as nats:
        yield lambda worker: connect(nats.url, run=run, worker=worker)
