"""The runs on a NATS server: listed and removed, unless their workers still say that they live."""

from __future__ import annotations

import os
from functools import partial
from typing import TYPE_CHECKING, Any

import anyio
import click

if TYPE_CHECKING:
    from collections.abc import Iterable

    from fleetbus.bus.base import Bus
    from fleetbus.bus.nats.runs import RunOnServer
    from fleetbus.config.settings import Configuration

LISTEN_SECONDS = 2.5
"""A heartbeat of every living worker comes within this."""


def list_on_server(configuration: Configuration) -> list[dict[str, Any]]:
    """One row per run; ``running`` if a worker of it was heard."""
    return anyio.run(partial(_list, configuration), backend_options={"use_uvloop": os.name != "nt"})


def remove_from_server(configuration: Configuration, names: Iterable[str], *, yes: bool) -> None:
    """Remove runs. Raises `UserError` if one is not there or runs; then nothing is removed."""
    anyio.run(
        partial(_remove, configuration, tuple(dict.fromkeys(names)), yes), backend_options={"use_uvloop": os.name != "nt"}
    )


async def _list(configuration: Configuration) -> list[dict[str, Any]]:
    import msgspec

    from fleetbus.bus.nats.bus import NatsBus

    async with _server(configuration) as bus:
        assert isinstance(bus, NatsBus)
        runs, living = await bus.runs(), await _find_live_runs(bus)
    return [msgspec.to_builtins(run) | {"running": run.run in living} for run in runs]


async def _remove(configuration: Configuration, names: tuple[str, ...], yes: bool) -> None:
    from fleetbus.bus.nats.bus import NatsBus
    from fleetbus.errors import UserError

    async with _server(configuration) as bus:
        assert isinstance(bus, NatsBus)
        known: dict[str, RunOnServer] = {run.run: run for run in await bus.runs()}
        for name in names:
            if name not in known:
                raise UserError(f"there is no run {name} on {configuration.nats.url}: `fleetbus runs list --nats` shows them")
        living = await _find_live_runs(bus)
        for name in names:
            if name in living:
                raise UserError(f"run {name} is running: stop its workers first")
        for name in names:
            size = (known[name].bytes + known[name].weights_bytes) / 1e6
            if yes or click.confirm(f"remove run {name} ({size:.1f} MB) from {configuration.nats.url}?", err=True):
                await bus.remove_run(name)
                print(f"removed {name}")


def _server(configuration: Configuration) -> Any:
    from fleetbus.auth.access import build_access
    from fleetbus.bus.nats import connect
    from fleetbus_workers.run_access.server_address import generate_worker_name

    access = build_access("init", configuration.nats.auth, configuration.run.name)
    return connect(
        configuration.nats.url, run=configuration.run.name, role="init", worker=generate_worker_name("runs"), **access
    )


async def _find_live_runs(bus: Bus) -> set[str]:
    """The runs of whose workers a heartbeat was heard."""
    from fleetbus_schemas.subjects import ALL_HEARTBEATS

    heard: set[str] = set()
    with anyio.move_on_after(LISTEN_SECONDS):
        async with bus.listen(ALL_HEARTBEATS) as listener:
            while True:
                subject, _ = await listener.receive()
                heard.add(subject.split(".")[1])
    return heard


def print_server_runs(rows: list[dict[str, Any]]) -> None:
    from rich.table import Table

    from fleetbus_workers.terminal import open_console

    table = Table("run", "state", "changed", box=None, header_style="bold", pad_edge=False)
    for name in ("entries", "log", "reserved", "weights"):
        table.add_column(name, justify="right")
    for row in rows:
        sizes = (f"{row[name] / 1e6:.1f} MB" for name in ("bytes", "reserved_bytes", "weights_bytes"))
        changed = row["changed"][:16].replace("T", " ")
        table.add_row(row["run"], "running" if row["running"] else "stopped", changed, str(row["entries"]), *sizes)
    open_console(highlight=False, markup=False).print(table)
