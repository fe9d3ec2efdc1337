"""``fleetbus environment``: one environment worker."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import anyio
import click

from fleetbus_workers.cli.options import SettingsCommand, settings_options
from fleetbus_workers.cli.role import Work, role_options, run_role

if TYPE_CHECKING:
    from fleetbus.bus.base import Bus
    from fleetbus.config.settings import Configuration


def _load_work() -> Work:
    from fleetbus_workers.assembly.environments import open_environments
    from fleetbus_workers.environment.images.store import build_run_image_store
    from fleetbus_workers.environment.worker import run_environment

    async def work(bus: Bus, configuration: Configuration, name: str, drain: anyio.Event) -> None:
        store_image = build_run_image_store(bus, configuration) if configuration.environment.images else None
        required = configuration.environment.sandbox == "required"
        async with open_environments(configuration, store_image=store_image, required=required) as factory:
            await run_environment(bus, configuration=configuration, name=name, drain=drain, make=factory)

    return work


@click.command("environment", cls=SettingsCommand)
@role_options
@settings_options("run", "nats", "environment", "fleet", "container", "limits", "log")
def command(**values: Any) -> int:
    """An environment worker: takes requested episodes, plays them with whatever policy answers, grades them.

    Install with `pip install 'fleetbus[environment]'`; needs no torch. SIGTERM or Ctrl-C: finish or hand back, then exit.
    """
    return run_role("environment", _load_work, values)
