"""Options of the commands that look at a run: where it is, its archive, the monitoring address of its server."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from collections.abc import Callable


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

    def keep_named_run(context: click.Context, _: click.Parameter, value: str | None) -> None:
        context.meta["fleetbus.run"] = value

    def choose_run(context: click.Context, _: click.Parameter, value: str | None) -> str | None:
        named = context.meta.get("fleetbus.run")
        if value is not None and named not in (None, value):
            raise click.UsageError(f"two runs are named: {value} and --run {named}")
        return value if value is not None else named

    argument = click.argument("run", required=False, metavar="[RUN]", callback=choose_run)
    option = click.option(
        "--run", "named_run", metavar="RUN", is_eager=True, expose_value=False, callback=keep_named_run, help="The same as RUN"
    )
    return argument(option(function))


def archive_option(alone: str = "") -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator: ``--archive DIR`` as the argument ``archive``; ``alone`` is passed in addition."""
    from pathlib import Path

    return click.option(
        "--archive",
        type=click.Path(path_type=Path, file_okay=False, exists=True),
        metavar="DIR",
        help=f"The recorder's archive, needed for a trimmed log{alone}",
    )


def nats_http_option(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator: ``--nats-http URL`` as the argument ``nats_http``, for `nats_http_of`."""
    return click.option(
        "--nats-http",
        "--monitor-url",
        "nats_http",
        metavar="URL",
        default="",
        help="The NATS server's monitoring address (default: that of `up`)",
    )(function)
