"""Connects viewers of a run to its log: the named server, the one that `up` runs, or one of their own on its files."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import TYPE_CHECKING

import msgspec

from fleetbus.auth.access import build_access
from fleetbus.config.run_folder import run_folder
from fleetbus.errors import BusClosed, BusError, UserError
from fleetbus_workers.observe.run.resume_command import build_resume_command
from fleetbus_workers.run_access.server_address import find_local_server_url, generate_worker_name, resolve_server_url
from fleetbus_workers.run_access.shared_server import share_server

if TYPE_CHECKING:
    from fleetbus.bus.base import Bus
    from fleetbus.bus.nats.bus import NatsBus
    from fleetbus.config.settings import Configuration
    from fleetbus_workers.observe.run.termination import Driver


@asynccontextmanager
async def open_run(configuration: Configuration, role: str, *, own_server: bool = False) -> AsyncIterator[Bus]:
    """A bus of the run for the length of the block; raises `UserError` when there is none.

    With ``own_server`` a run that nobody serves now is served from its own files meanwhile, by a server that all who read
    them share; an `up` that begins takes over, and the connection continues with its server.
    """
    from fleetbus.bus.nats import connect

    name, run = generate_worker_name(role), configuration.run.name
    folder = run_folder(configuration.run)
    if own_server and not configuration.nats.url and folder.store.is_dir():
        # files that no `up` serves are read without keys: whoever can serve them could read them, too
        access = build_access(role, configuration.nats.auth if find_local_server_url(folder) else "", run)
        async with share_server(folder) as url, connect(url, run=run, role=role, worker=name, **access) as bus:
            await _check_run(bus, run)
            yield bus
        return
    access = build_access(role, configuration.nats.auth, run)
    async with connect(resolve_server_url(configuration), run=run, role=role, worker=name, **access) as bus:
        await _check_run(bus, run)
        yield bus


def open_other_run(configuration: Configuration, run: str) -> AbstractAsyncContextManager[Bus]:
    """A bus of another run, of the folder or the server of this one, for a viewer; as `open_run` with ``own_server``."""
    other = msgspec.structs.replace(configuration, run=msgspec.structs.replace(configuration.run, name=run))
    return open_run(other, "monitor", own_server=True)


def build_driver(configuration: Configuration) -> Driver:
    """Detect whether an `up` on this machine drives the run."""
    from fleetbus_workers.observe.run.termination import Driver

    run, folder = configuration.run, run_folder(configuration.run)
    command = build_resume_command(run.name, run.folder) if folder.configuration.is_file() else ""

    def is_driving() -> bool | None:
        return None if configuration.nats.url else bool(find_local_server_url(folder))

    return Driver(is_driving=is_driving, command=command)


async def _check_run(bus: NatsBus, run: str) -> None:
    try:
        await bus.check_log(reading=True)
    except BusClosed:
        raise
    except BusError as error:
        raise UserError(f"the log of run {run} cannot be read: {error}: check the run's name and --nats") from error


def is_reachable(configuration: Configuration) -> bool:
    """True if there is anything to connect to, or files to serve, which a server has to be able to write."""
    try:
        resolve_server_url(configuration)
    except UserError:
        store = run_folder(configuration.run).store
        return store.is_dir() and os.access(store, os.W_OK)
    return True
