"""How commands that look at a run reach its log: the named server, the one that `up` runs, or one of their own on its files."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import click

from fleetbus.errors import UserError
from fleetbus_workers.cli.role import find_local_server_url, generate_worker_name, resolve_server_url

if TYPE_CHECKING:
    from collections.abc import Callable

    from fleetbus.bus.base import Bus
    from fleetbus.config.settings import Configuration
    from fleetbus_workers.overview.termination import Driver


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


def run_argument(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator: the run as an argument, or as ``--run`` as for the commands that work; the function gets it as ``run``."""

    def kept(context: click.Context, _: click.Parameter, value: str | None) -> None:
        context.meta["fleetbus.run"] = value

    def chosen(context: click.Context, _: click.Parameter, value: str | None) -> str | None:
        named = context.meta.get("fleetbus.run")
        if value is not None and named not in (None, value):
            raise click.UsageError(f"two runs are named: {value} and --run {named}")
        return value if value is not None else named

    argument = click.argument("run", required=False, metavar="[RUN]", callback=chosen)
    option = click.option(
        "--run", "named_run", metavar="RUN", is_eager=True, expose_value=False, callback=kept, help="The same as RUN"
    )
    return argument(option(function))


def archive_option(alone: str = "") -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator: ``--archive DIR`` as the argument ``archive``; ``alone`` is passed in addition."""
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
    from fleetbus.auth.access import build_access
    from fleetbus.bus.nats import connect
    from fleetbus.bus.nats.server import run_server
    from fleetbus.config.run_folder import run_folder

    name, run = generate_worker_name(role), configuration.run.name
    folder = run_folder(configuration.run)
    if own_server and not configuration.nats.url and not find_local_server_url(folder) and folder.store.is_dir():
        own = run_server(folder.store, ends_with_parent=True)
        async with own as server, connect(server.url, run=run, role=role, worker=name) as bus:
            await _check_run(bus, run)
            yield bus
        return
    access = build_access(role, configuration.nats.auth)
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
