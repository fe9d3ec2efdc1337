"""Environments in the process of a gateway: an environment worker beside it, asked directly instead of over the bus.

For one machine: a step has one hop less. Everything else is as with a separate worker - the journal, the claims, heartbeats, a
connection with the rights of its role - so that other workers of the run take over when this process dies, and it from them.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import anyio
import msgspec

from fleetbus.auth.access import build_access
from fleetbus.errors import UserError
from fleetbus_workers.assembly.environment_work import work

if TYPE_CHECKING:
    from fleetbus.client.sessions import SessionClient
    from fleetbus.config.settings import Configuration
    from fleetbus_workers.environment.images.observation import StoreImage
    from fleetbus_workers.environment.stepwise.host import SessionHost


DRAIN_SECONDS = 1.0
"""The gateway stops first, so that no session here would be called again: they are released for other workers to continue."""


@asynccontextmanager
async def host_environments(
    client: SessionClient,
    configuration: Configuration,
    *,
    worker: str,
    url: str,
    keep_image: Callable[[StoreImage], StoreImage],
) -> AsyncIterator[None]:
    """A worker of that name for the length of the body, which begins when it serves; at the end it drains. Raises
    `UserError` where the configuration has no places for sessions."""
    from fleetbus.bus.nats import connect

    if not configuration.environment.session_slots:
        raise UserError("environment.session_slots is 0: a gateway that runs environments needs places for sessions")
    limits = msgspec.structs.replace(configuration.limits, drain=DRAIN_SECONDS)
    configuration = msgspec.structs.replace(configuration, limits=limits)
    run = configuration.run.name
    access = build_access("environment", configuration.nats.auth, run)
    drain, hosting = anyio.Event(), anyio.Event()

    def use(host: SessionHost) -> None:
        client.add_local_host(worker, host.call)
        hosting.set()

    async with connect(url, run=run, role="environment", worker=worker, **access) as bus, anyio.create_task_group() as group:

        async def serve() -> None:
            await work(bus, configuration, worker, drain, keep_image=keep_image, on_hosting=use)

        group.start_soon(serve)
        await hosting.wait()
        try:
            yield
        finally:
            drain.set()
