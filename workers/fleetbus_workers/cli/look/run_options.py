"""Options of the commands that look at a run: where it is, its archive, the monitoring address of its server."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click


def reach_options(function: Callable[..., object]) -> Callable[..., Any]:
    """Decorator: where the run is. The values have the names that `fleetbus_workers.cli.options.load_settings` takes."""
    options = [
        click.option("--nats", "nats__url", metavar="URL", help="Server to use, or a NATS context (default: the run's own)"),
        click.option(
            "--nats-auth", "nats__auth", metavar="PATH", help="Folder with keys (fleetbus auth init), or a .creds file"
        ),
        click.option("--run-folder", "run__folder", metavar="FOLDER", help="Folder in which each run has a folder of its own"),
        click.option("--config", type=click.Path(path_type=Path, dir_okay=False), help="TOML file with settings"),
    ]
    for option in reversed(options):
        function = option(function)
    return function


_NAMED_RUN = "fleetbus.run"
"""Where the context keeps what ``--run`` names, until the argument is read."""


def run_argument(function: Callable[..., object]) -> Callable[..., Any]:
    """Decorator: the run as an argument, or as ``--run`` as for the commands that work; the function gets it as ``run``."""
    return click.argument("run", required=False, metavar="[RUN]", callback=_choose_run)(_run_option(function))


def source_argument(function: Callable[..., object]) -> Callable[..., Any]:
    """Decorator: a run or a recording as an argument, or a run as ``--run``; the function gets it as ``source``."""
    return click.argument("source", required=False, metavar="[RUN|FILE]", callback=_choose_run)(_run_option(function))


def source_and_episode_arguments(function: Callable[..., object]) -> Callable[..., Any]:
    """Decorator: as `source_argument`, and an ``episode`` after it, which is the only argument besides ``--run``."""

    def choose_source(context: click.Context, _: click.Parameter, value: str | None) -> str | None:
        named: str | None = context.meta.get(_NAMED_RUN)
        if named is None or value == named:
            return value
        context.meta["fleetbus.episode"] = value
        return named

    def choose_episode(context: click.Context, _: click.Parameter, value: str | None) -> str | None:
        before: str | None = context.meta.get("fleetbus.episode")
        if before is not None and value is not None:
            raise click.UsageError(f"two runs are named: {before} and --run {context.meta[_NAMED_RUN]}")
        return value if value is not None else before

    source = click.argument("source", required=False, metavar="[RUN|FILE]", callback=choose_source)
    episode = click.argument("episode", required=False, metavar="[EPISODE]", callback=choose_episode)
    return source(episode(_run_option(function)))


def _run_option(function: Callable[..., object]) -> Callable[..., object]:
    def keep(context: click.Context, _: click.Parameter, value: str | None) -> None:
        context.meta[_NAMED_RUN] = value

    return click.option(
        "--run", "named_run", metavar="RUN", is_eager=True, expose_value=False, callback=keep, help="The same as RUN"
    )(function)


def _choose_run(context: click.Context, _: click.Parameter, value: str | None) -> str | None:
    named: str | None = context.meta.get(_NAMED_RUN)
    if value is not None and named not in (None, value):
        raise click.UsageError(f"two runs are named: {value} and --run {named}")
    return value if value is not None else named


def archive_option(alone: str = "") -> Callable[[Callable[..., Any]], Callable[..., object]]:
    """Decorator: ``--archive`` as the argument ``archive``, a folder; ``alone`` is passed in addition."""
    return click.option(
        "--archive",
        multiple=True,
        metavar="DIR|URL",
        callback=_open_archive,
        help=f"The recorder's archive, its folder or recorder.store, or both; needed for a trimmed log{alone}",
    )


def _open_archive(context: click.Context, _: click.Parameter, places: tuple[str, ...]) -> Path | None:
    if not places:
        return None
    from fleetbus_workers.recorder.archive_places import open_archive_places

    return context.with_resource(open_archive_places(places))


def nats_http_option(function: Callable[..., object]) -> Callable[..., Any]:
    """Decorator: ``--nats-http URL``, repeated, as the argument ``nats_http`` with commas, for `read_nats_servers`."""
    return click.option(
        "--nats-http",
        "--monitor-url",
        "nats_http",
        metavar="URL",
        multiple=True,
        callback=lambda _context, _option, urls: ",".join(urls),
        help="The NATS server's monitoring address (default: that of `up`); once for each server of a cluster",
    )(function)
