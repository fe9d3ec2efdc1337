"""How who looks at a run reaches its log: the named server, the one that `up` runs, or one of their own on its files."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from fleetbus.errors import UserError
from fleetbus_workers.run_access.server_address import find_local_server_url, generate_worker_name, resolve_server_url

if TYPE_CHECKING:
    from fleetbus.bus.base import Bus
    from fleetbus.config.settings import Configuration
    from fleetbus_workers.overview.termination import Driver


@asynccontextmanager
async def open_run(configuration: Configuration, role: str, *, own_server: bool = False) -> AsyncIterator[Bus]:
    """A bus of the run for the length of the block; raises `UserError` when there is none.

    With ``own_server`` a run that is not served is served from its own files meanwhile: for those that only read.
    """
    from fleetbus.auth.access import build_access
    from fleetbus.auth.stores import reading_config
    from fleetbus.bus.nats import connect
    from fleetbus.bus.nats.server import run_server
    from fleetbus.config.run_folder import run_folder

    name, run = generate_worker_name(role), configuration.run.name
    folder = run_folder(configuration.run)
    if own_server and not configuration.nats.url and not find_local_server_url(folder) and folder.store.is_dir():
        own = run_server(folder.store, config=reading_config(folder.store, run), ends_with_parent=True)
        async with own as server, connect(server.url, run=run, role=role, worker=name) as bus:
            await _check_run(bus, run)
            yield bus
        return
    access = build_access(role, configuration.nats.auth, run)
    async with connect(resolve_server_url(configuration), run=run, role=role, worker=name, **access) as bus:
        await _check_run(bus, run)
        yield bus


def build_driver(configuration: Configuration) -> Driver:
    """Detect whether an `up` on this machine drives the run."""
    from fleetbus.config.run_folder import run_folder
    from fleetbus_workers.overview.resume_command import build_resume_command
    from fleetbus_workers.overview.termination import Driver

    run, folder = configuration.run, run_folder(configuration.run)
    command = build_resume_command(run.name, run.folder) if folder.configuration.is_file() else ""

    def is_driving() -> bool | None:
        return None if configuration.nats.url else bool(find_local_server_url(folder))

    return Driver(is_driving=is_driving, command=command)


async def _check_run(bus: Bus, run: str) -> None:
    from fleetbus.errors import BusClosed, BusError

    try:
        await bus.last_sequence()
    except BusClosed:
        raise
    except BusError as error:
        raise UserError(f"the log of run {run} cannot be read: {error}: check the run's name and --nats") from error


def is_reachable(configuration: Configuration) -> bool:
    """Whether there is anything to connect to, or files to serve."""
    from fleetbus.config.run_folder import run_folder

    try:
        resolve_server_url(configuration)
    except UserError:
        return run_folder(configuration.run).store.is_dir()
    return True
