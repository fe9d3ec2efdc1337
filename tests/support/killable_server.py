"""A nats-server that outlives the event loops of single tests, which may kill it and start it again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import anyio.to_thread
from anyio.from_thread import BlockingPortal, start_blocking_portal

from fleetbus.bus.nats.server import NatsServerProcess, run_server


class KillableServer:
    """``url`` and ``store`` stay the same over restarts."""

    def __init__(self, process: NatsServerProcess, portal: BlockingPortal) -> None:
        self._process = process
        self._portal = portal
        self.url = process.url
        self.store = process.store

    async def kill(self) -> None:
        await anyio.to_thread.run_sync(self._portal.call, self._process.kill)

    async def restart(self) -> None:
        await anyio.to_thread.run_sync(self._portal.call, self._process.restart)


@contextmanager
def killable_server(store: Path) -> Iterator[KillableServer]:
    with start_blocking_portal() as portal, portal.wrap_async_context_manager(run_server(store)) as process:
        yield KillableServer(process, portal)
