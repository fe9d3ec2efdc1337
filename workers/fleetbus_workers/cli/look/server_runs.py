"""The runs on a NATS server: listed and removed, unless their workers still say that they live."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import anyio
import click
import msgspec

from fleetbus.auth.access import build_access
from fleetbus.errors import UserError
from fleetbus_schemas.subjects import ALL_HEARTBEATS
from fleetbus_workers.cli.output import build_table
from fleetbus_workers.command.event_loop import run_async
from fleetbus_workers.command.terminal import open_console
from fleetbus_workers.run_access.server_address import generate_worker_name

if TYPE_CHECKING:
    from collections.abc import Iterable

    from fleetbus.bus.base import CallBus
    from fleetbus.bus.nats.runs import RunOnServer
    from fleetbus.config.settings import Configuration

LISTEN_SECONDS = 2.5
"""A heartbeat of every living worker comes within this."""


def list_on_server(configuration: Configuration) -> list[dict[str, object]]:
    """One row per run; ``running`` if a worker of it was heard."""
    return run_async(_list, configuration)


def remove_from_server(configuration: Configuration, names: Iterable[str], *, yes: bool) -> None:
    """Remove runs. Raises `UserError` if one is not there or runs; then nothing is removed."""
    run_async(_remove, configuration, tuple(dict.fromkeys(names)), yes)


async def _list(configuration: Configuration) -> list[dict[str, Any]]:
    from fleetbus.bus.nats.bus import NatsBus

    async with _server(configuration) as bus:
        assert isinstance(bus, NatsBus)
        runs, living = await bus.runs(), await _find_live_runs(bus)
    return [msgspec.to_builtins(run) | {"running": run.run in living} for run in runs]


async def _remove(configuration: Configuration, names: tuple[str, ...], yes: bool) -> None:
    from fleetbus.bus.nats.bus import NatsBus

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
    from fleetbus.bus.nats import connect

    access = build_access("init", configuration.nats.auth, configuration.run.name)
    return connect(
        configuration.nats.url, run=configuration.run.name, role="init", worker=generate_worker_name("runs"), **access
    )


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
