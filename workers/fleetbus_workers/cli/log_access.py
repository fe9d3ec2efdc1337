"""How commands that look at a run reach its log: the named server, the one that `up` runs, or one of their own on its files."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import click

from fleetbus.errors import UserError
from fleetbus_workers.cli.role import made_up_name, served_at, server_url

if TYPE_CHECKING:
    from collections.abc import Callable

    from fleetbus.bus.base import Bus
    from fleetbus.config.settings import Configuration
    from fleetbus_workers.overview.ending import Driver


def reach_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator: where the run is. The values have the names that `fleetbus_workers.cli.options.load_settings` takes."""
    from pathlib import Path

    options = [
        click.option("--nats", "nats__url", metavar="URL", help="Server to use (default: the run's own)"),
        click.option(
            "--nats-auth", "nats__auth", metavar="FOLDER", help="Folder with key and certificates (fleetbus auth init)"
        ),
        click.option("--run-folder", "run__folder", metavar="TEXT", help="Folder that holds a folder per run"),
        click.option("--config", type=click.Path(path_type=Path, dir_okay=False), help="TOML file with settings"),
    ]
    for option in reversed(options):
        function = option(function)
    return function


def archive_option(alone: str = "") -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator: ``--archive DIR`` as the argument ``archive``; ``alone`` is told of it besides."""
    from pathlib import Path

    return click.option(
        "--archive",
        type=click.Path(path_type=Path, file_okay=False, exists=True),
        metavar="DIR",
        help=f"The recorder's archive, for a log that was trimmed{alone}",
    )


@asynccontextmanager
async def open_run(configuration: Configuration, role: str, *, own_server: bool = False) -> AsyncIterator[Bus]:
    """A bus of the run for the length of the block; raises `UserError` when there is none.

    With ``own_server`` a run that nobody serves now is served from its own files meanwhile: for those that only read.
    """
    from fleetbus.auth.access import access_for
    from fleetbus.bus.nats import connect
    from fleetbus.bus.nats.server import run_server
    from fleetbus.config.run_folder import run_folder

    name, run = made_up_name(role), configuration.run.name
    folder = run_folder(configuration.run)
    if own_server and not configuration.nats.url and not served_at(folder) and folder.store.is_dir():
        own = run_server(folder.store, ends_with_us=True)
        async with own as server, connect(server.url, run=run, role=role, worker=name) as bus:
            await _check_run(bus, run)
            yield bus
        return
    access = access_for(role, configuration.nats.auth)
    async with connect(server_url(configuration), run=run, role=role, worker=name, **access) as bus:
        await _check_run(bus, run)
        yield bus


def driver_of(configuration: Configuration) -> Driver:
    """What is known on this machine of who makes the run go on."""
    from fleetbus.config.run_folder import run_folder
    from fleetbus_workers.overview.ending import Driver
    from fleetbus_workers.overview.going_on import up_command

    run, folder = configuration.run, run_folder(configuration.run)
    command = up_command(run.name, run.folder) if folder.configuration.is_file() else ""

    def is_driving() -> bool | None:
        return None if configuration.nats.url else bool(served_at(folder))

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
        server_url(configuration)
    except UserError:
        return run_folder(configuration.run).store.is_dir()
    return True
