"""The runs on a NATS server: listed and removed, unless their workers still say that they live."""

from __future__ import annotations

import shutil
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import anyio.to_thread
import click
import msgspec

from fleetbus.auth.access import build_access, is_credentials
from fleetbus.auth.folder import list_runs_with_keys
from fleetbus.concurrency.task_groups import open_first_error_task_group
from fleetbus.config.run_folder import RunFolder
from fleetbus.errors import UserError
from fleetbus_schemas.subjects import ALL_HEARTBEATS
from fleetbus_workers.cli.options import validate_name
from fleetbus_workers.cli.output import build_table
from fleetbus_workers.command.event_loop import run_async
from fleetbus_workers.command.noted_operations import note_purge
from fleetbus_workers.command.terminal import open_console
from fleetbus_workers.run_access.server_address import generate_worker_name
from fleetbus_workers.up.lock import is_held

if TYPE_CHECKING:
    from fleetbus.bus.base import CallBus
    from fleetbus.bus.nats.bus import NatsBus
    from fleetbus.bus.nats.runs import RunOnServer
    from fleetbus.config.settings import Configuration

LISTEN_SECONDS = 2.5
"""A heartbeat of every living worker comes within this."""

CONNECTIONS_AT_ONCE = 8
"""Where each run is asked as its own admin."""


class _Found(msgspec.Struct, frozen=True):
    """A run on the server, and whether a worker of it was heard."""

    run: RunOnServer
    running: bool


def list_on_server(configuration: Configuration) -> list[dict[str, object]]:
    """One row per run; ``running`` if a worker of it was heard. With keys: of the runs whose admin's key is in the folder."""
    found = run_async(_find_runs, configuration, None)
    return [msgspec.to_builtins(each.run) | {"running": each.running} for each in found.values()]


def remove_from_server(configuration: Configuration, names: Iterable[str], *, yes: bool) -> None:
    """Remove runs, and the files that their workers left in the folder of runs on this machine. Raises `UserError` if one is
    neither there nor here, or runs; then nothing is removed."""
    run_async(_remove, configuration, tuple(dict.fromkeys(names)), yes)


async def _find_runs(configuration: Configuration, names: Sequence[str] | None) -> dict[str, _Found]:
    """The runs on the server by name; with keys each is in an account of its own, and its admin is asked. ``names``: no
    others are wanted."""
    auth = configuration.nats.auth
    if not auth or is_credentials(auth):
        return await _find_in_account(configuration, configuration.run.name)
    admins = list_runs_with_keys(auth) if names is None else [name for name in names if name in list_runs_with_keys(auth)]
    if not admins:
        raise UserError(f"no admin's key of {'a run' if names is None else ', '.join(names)} in {auth}: each run has its own")
    found: dict[str, _Found] = {}
    limiter = anyio.CapacityLimiter(CONNECTIONS_AT_ONCE)

    async def find(run: str) -> None:
        async with limiter:
            found.update(await _find_in_account(configuration, run))

    async with open_first_error_task_group() as tasks:
        for run in admins:
            tasks.start_soon(find, run)
    return dict(sorted(found.items()))


async def _find_in_account(configuration: Configuration, admin_of: str) -> dict[str, _Found]:
    async with _connect(configuration, admin_of) as bus:
        runs, living = await bus.runs(), await _find_live_runs(bus)
    return {run.run: _Found(run, run.run in living) for run in runs}


async def _remove(configuration: Configuration, names: tuple[str, ...], yes: bool) -> None:
    found = await _find_runs(configuration, names)
    folders = {name: folder for name in names if (folder := _find_left_folder(configuration, name)) is not None}
    for name in names:
        if name not in found and name not in folders:
            raise UserError(f"there is no run {name} on {configuration.nats.url}: `fleetbus runs list --nats` shows them")
        if name in found and found[name].running:
            raise UserError(f"run {name} is running: stop its workers first")
    for name in names:
        run, folder = found.get(name), folders.get(name)
        places = [f"{(run.run.bytes + run.run.weights_bytes) / 1e6:.1f} MB on {configuration.nats.url}"] if run else []
        places += [str(folder)] if folder else []
        if yes or click.confirm(f"remove run {name} ({', '.join(places)})?", err=True):
            await anyio.to_thread.run_sync(partial(note_purge, configuration, name, author=generate_worker_name("runs")))
            if run:
                async with _connect(configuration, name) as bus:
                    await bus.remove_run(name)
            if folder:
                await anyio.to_thread.run_sync(shutil.rmtree, folder)
            print(f"removed {name}" + (f" and {folder}" if folder else ""))


def _find_left_folder(configuration: Configuration, name: str) -> Path | None:
    """Files of the workers of a run on a server: checkpoints, weights, the model. A run with a server of its
    own is another one."""
    folder = RunFolder(Path(configuration.run.folder).expanduser() / validate_name("run", name))
    is_of_server = folder.path.is_dir() and not folder.path.is_symlink() and not folder.store.exists()
    is_left = any(part.exists() for part in (folder.checkpoints, folder.weights, folder.identity, folder.configuration))
    if is_of_server and is_left and is_held(folder.lock):
        raise UserError(f"run {name} is running: stop `fleetbus up` first")
    return folder.path if is_of_server and is_left else None


@asynccontextmanager
async def _connect(configuration: Configuration, run: str) -> AsyncGenerator[NatsBus]:
    """As the admin of ``run``, or as anybody on a server without keys."""
    from fleetbus.bus.nats import connect

    access = build_access("init", configuration.nats.auth, run)
    worker = generate_worker_name("runs")
    async with connect(configuration.nats.url, run=run, role="init", worker=worker, **access) as bus:
        yield bus


async def _find_live_runs(bus: CallBus) -> set[str]:
    """The runs of whose workers a heartbeat was heard."""
    heard: set[str] = set()
    with anyio.move_on_after(LISTEN_SECONDS):
        async with bus.listen(ALL_HEARTBEATS) as listener:
            while True:
                subject, _ = await listener.receive()
                heard.add(subject.split(".")[1])
    return heard


def print_server_runs(rows: list[dict[str, Any]]) -> None:
    table = build_table("run,state,changed", right="entries,log,reserved,weights")
    for row in rows:
        sizes = (f"{row[name] / 1e6:.1f} MB" for name in ("bytes", "reserved_bytes", "weights_bytes"))
        changed = row["changed"][:16].replace("T", " ")
        table.add_row(row["run"], "running" if row["running"] else "stopped", changed, str(row["entries"]), *sizes)
    open_console(highlight=False).print(table)
