"""A server that outlives the event loops of single tests, which may kill it and start it again; of the form that
`tests.support.servers` says."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anyio.to_thread
from anyio.from_thread import BlockingPortal, start_blocking_portal

from fleetbus.auth.access import Access
from fleetbus.bus.streams import plan_run
from tests.support.servers import FORM, RunningServers, ServerGroup, running_servers

ACCOUNT = "contract"
"""The run whose account holds the streams of all tests: its admin may do everything there."""


class KillableServer:
    """``url`` and ``store`` stay the same over restarts; ``access`` lets in whoever connects."""

    def __init__(self, servers: RunningServers, portal: BlockingPortal) -> None:
        self._process: Any = servers.processes[0] if servers.replicas == 1 else ServerGroup(servers)
        self._portal = portal
        self.url = servers.url
        self.store: Path = self._process.store
        self.access: Access = servers.access(ACCOUNT, "admin")
        self.access.pop("plan_on_server", None)  # consumers keep their names: here everybody is the admin

    async def kill(self) -> None:
        await anyio.to_thread.run_sync(self._portal.call, self._process.kill)

    async def restart(self) -> None:
        await anyio.to_thread.run_sync(self._portal.call, self._process.restart)


@contextmanager
def killable_server(store: Path, *, form: str = FORM) -> Iterator[KillableServer]:
    plans = [plan_run(ACCOUNT, lanes=1)]
    with tempfile.TemporaryDirectory() as folder, start_blocking_portal() as portal:
        with portal.wrap_async_context_manager(running_servers(Path(folder), plans, store=store, form=form)) as servers:
            yield KillableServer(servers, portal)
