"""``fleetbus runs list|rm``: the runs in a folder, what became of them, and their removal."""

import datetime
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import click
import msgspec

from fleetbus.config.run_folder import RunFolder
from fleetbus.config.settings import Configuration
from fleetbus.errors import FleetbusError, UserError
from fleetbus_schemas import CheckpointStored, EvaluationFinished, LineageStarted, StepTrained, Subjects, TrainingFinished
from fleetbus_schemas.message import UNREADABLE, decode_any
from fleetbus_workers.cli.look.server_runs import list_on_server, print_server_runs, remove_from_server
from fleetbus_workers.cli.options import load_settings, validate_name
from fleetbus_workers.cli.output import build_table, json_option, print_json
from fleetbus_workers.command.exit_status import FINISHED
from fleetbus_workers.command.noted_operations import note_purge
from fleetbus_workers.command.terminal import open_console
from fleetbus_workers.run_access.log_access import open_run
from fleetbus_workers.run_access.server_address import generate_worker_name
from fleetbus_workers.up.lock import is_held

_PARTS = ("run.json", "config.json", "nats", "checkpoints", "weights")
"""What makes a folder that of a run; a learner without `up` leaves the last two alone."""

STEP_SECONDS = 3.0
"""For asking the server of a run that is running for its last step."""


class _Result(msgspec.Struct, frozen=True, kw_only=True):
    """The part of a summary that is listed; other releases may have left out some of it."""

    run: str = ""
    finished: bool = False
    optimizer_steps: int | None = None
    success_start: float | None = None
    success_end: float | None = None
    signal: str = ""


def server_options(function: Callable[..., object]) -> Callable[..., Any]:
    """Decorator: a server whose runs are meant, and not those of a folder."""
    url = click.option("--nats", "nats__url", metavar="URL", help="Use the runs on this server instead of a folder")
    auth = click.option(
        "--nats-auth", "nats__auth", metavar="PATH", help="Folder with keys (fleetbus auth init), or a .creds file"
    )
    return url(auth(function))


def folder_options(function: Callable[..., object]) -> Callable[..., Any]:
    """Decorator: where the runs are, as `runs_folder` takes it."""
    folder = click.option(
        "--run-folder",
        "run__folder",
        type=click.Path(file_okay=False),
        help="Folder in which each run has a folder of its own (default: the configured one)",
    )
    config = click.option("--config", type=click.Path(path_type=Path, dir_okay=False), help="TOML file with settings")
    return folder(config(function))


def runs_folder(values: dict[str, object]) -> Path:
    """The folder in which `up` keeps its runs; raises `UserError`."""
    return Path(load_settings(values, earlier=False).configuration.run.folder).expanduser()


@click.group("runs")
def command() -> None:
    """List or remove the runs on this machine or on a NATS server."""


@command.command("list", short_help="Active or not, last written, size, result")
@folder_options
@server_options
@json_option()
def list_runs(as_json: bool, **values: object) -> int:
    """List the runs in a folder: whether they are active, when they were last written, their sizes and results.

    With --nats, list the runs on a server: whether they have live workers, the size of their logs and their reserved storage.
    With keys: those whose admin's key is in the folder.
    """
    if values["nats__url"]:
        return _list_on_server(as_json, values)
    folder = runs_folder(values)
    rows = [_describe_run(path) for path in sorted(folder.iterdir()) if _is_run(path)] if folder.is_dir() else []
    if as_json:
        print_json(rows)
    elif not rows:
        print(f"no runs in {folder}: `fleetbus up` creates one")
    else:
        _print(rows)
    return FINISHED


@command.command("rm", short_help="Remove runs with all their files")
@click.argument("names", nargs=-1, required=True, metavar="RUN...")
@folder_options
@server_options
@click.option("--yes", is_flag=True, help="Do not ask for confirmation")
def remove_runs(names: tuple[str, ...], yes: bool, **values: object) -> int:
    """Remove runs with all their files: log, weights, checkpoints, models. An active run is refused.

    With --nats, remove log, lanes and weights on a server, and what the run's workers left in the folder of runs. Exit status
    0: removed; 2: a run is unknown or active, and nothing was removed.
    """
    if values["nats__url"]:
        remove_from_server(load_settings(values, earlier=False).configuration, names, yes=yes)
        return FINISHED
    configuration, folder = load_settings(values, earlier=False).configuration, runs_folder(values)
    chosen = []
    for name in dict.fromkeys(names):
        path = folder / validate_name("run", name)
        if path.is_symlink() or not _is_run(path):
            raise UserError(f"there is no run {name} in {folder}: `fleetbus runs list` shows them")
        if _is_running(path):
            raise UserError(f"run {name} is running: stop `fleetbus up` first")
        chosen.append(path)
    for path in chosen:
        if yes or click.confirm(f"remove {path} ({_measure_bytes(path) / 1e6:.1f} MB)?", err=True):
            note_purge(configuration, path.name, author=generate_worker_name("runs"))
            shutil.rmtree(path)
            print(f"removed {path.name}")
    return FINISHED


def _list_on_server(as_json: bool, values: dict[str, object]) -> int:
    rows = list_on_server(load_settings(values, earlier=False).configuration)
    if as_json:
        print_json(rows)
    elif not rows:
        print(f"no runs on {values['nats__url']}: `fleetbus up` or `fleetbus init` creates one{_describe_keys(values)}")
    else:
        print_server_runs(rows)
    return FINISHED


def _describe_keys(values: dict[str, object]) -> str:
    return f" (looked for those whose admin's key is in {values['nats__auth']})" if values["nats__auth"] else ""


def _is_run(path: Path) -> bool:
    return path.is_dir() and any(
        (path / name).exists() for name in ("run.json", "config.json", "nats", "checkpoints", "weights")
    )


def _is_running(path: Path) -> bool:
    """True while an `up` holds the run's lock."""
    return is_held(path / "lock")


def _describe_run(path: Path) -> dict[str, Any]:
    from fleetbus_workers.learner.checkpoints import list_checkpoints

    run = RunFolder(path)
    running, checkpoints = _is_running(path), list_checkpoints(run.checkpoints)
    summary = _read_result(run)
    reached = max((step for _, step, is_whole in checkpoints if is_whole), default=0)
    is_current = not running and (summary.optimizer_steps or 0) >= reached
    result = summary if is_current else _Result()  # an `up` that was killed, or runs now, leaves that of the one before
    steps = _read_step(path) if running else result.optimizer_steps
    changed = [_read_stat(folder, name, "st_mtime") for folder, _, names in os.walk(path) for name in names]
    return {
        "run": path.name,
        "running": running,
        "changed": max(changed, default=0.0),
        "bytes": _measure_bytes(path),
        "model": run.model.is_dir(),
        "finished": result.finished,
        "checkpoints": len(checkpoints),
        "steps": reached or None if steps is None else steps,
        "success_before": summary.success_start,
        "success_after": result.success_end,
        "signal": result.signal,
    }


def _read_step(path: Path) -> int | None:
    """The last step in the log of a run that `up` drives now; None if its server does not tell in time."""
    settings = {"run__name": path.name, "run__folder": str(path.parent)}
    try:
        return anyio.run(_ask_for_step, load_settings(settings).configuration)
    except (FleetbusError, TimeoutError):
        return None


async def _ask_for_step(configuration: Configuration) -> int | None:
    with anyio.fail_after(STEP_SECONDS):
        async with open_run(configuration, "look") as bus:
            subject = Subjects(configuration.run.name).train(configuration.run.policy)
            last = await bus.last(subject)
            if last is None:
                return None
            types = (StepTrained, CheckpointStored, EvaluationFinished, TrainingFinished, LineageStarted)
            entry = decode_any(types, last.payload, subject=subject)
            return entry.parent_step if isinstance(entry, LineageStarted) else int(getattr(entry, "step", 0))


def _read_result(run: RunFolder) -> _Result:
    """Nothing is known of a run whose summary cannot be read, or is of the run that its folder is a copy of."""
    try:
        result = msgspec.json.decode(run.summary.read_bytes(), type=_Result)
    except (OSError, *UNREADABLE):
        return _Result()
    return result if result.run in ("", run.path.name) else _Result()


def _measure_bytes(path: Path) -> int:
    return sum(_read_stat(folder, name, "st_size") for folder, _, names in os.walk(path) for name in names)


def _read_stat(folder: str | Path, name: str, field: str) -> Any:
    """A field of a file's status, 0 for one that is gone: a running server removes files meanwhile."""
    try:
        return getattr(os.lstat(os.path.join(folder, name)), field)
    except FileNotFoundError:
        return 0


def _print(rows: list[dict[str, Any]]) -> None:
    table = build_table("run,state,changed", right="size,steps,held out")
    for row in rows:
        changed = datetime.datetime.fromtimestamp(row["changed"]).strftime("%Y-%m-%d %H:%M")
        state = "running" if row["running"] else "finished" if row["finished"] else "stopped"
        before, after = row["success_before"], row["success_after"]
        success = "" if before is None else f"{before:.0%} → {'' if after is None else f'{after:.0%}'}".rstrip()
        steps = "" if row["steps"] is None else str(row["steps"])
        table.add_row(row["run"], state, changed, f"{row['bytes'] / 1e6:.1f} MB", steps, success)
    console = open_console(highlight=False)
    console.print(table)
    for row in rows:
        if row["signal"] and not row["running"]:
            console.print(f"{row['run']}: {row['signal']}", style="yellow")
