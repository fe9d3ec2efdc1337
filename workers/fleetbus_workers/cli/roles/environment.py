"""``fleetbus environment``: one environment worker."""

from functools import partial
from typing import Any

import anyio
import click

from fleetbus.auth.access import build_access
from fleetbus.bus.base import Bus
from fleetbus.concurrency.blocked_loop import watch_blocked_loop
from fleetbus.config.settings import Configuration
from fleetbus_schemas import Subjects
from fleetbus_workers.assembly.work import Work
from fleetbus_workers.cli.options import SettingsCommand, settings_options
from fleetbus_workers.cli.roles.role import role_options, run_role
from fleetbus_workers.run_access.server_address import resolve_server_url


def _load_work() -> Work:
    from fleetbus.bus.nats import connect
    from fleetbus_workers.assembly.environment_work import work
    from fleetbus_workers.environment.blocked_loop_report import BlockedLoopReport

    async def work_watched(bus: Bus, configuration: Configuration, name: str, drain: anyio.Event) -> None:
        run = configuration.run.name
        access = build_access("environment", configuration.nats.auth, run)
        url = resolve_server_url(configuration)
        report = BlockedLoopReport(
            partial(connect, url, run=run, role="environment", worker=name, **access),
            Subjects(run),
            worker=name,
            slots=configuration.environment.slots,
        )
        await work(bus, configuration, name, drain, watch=watch_blocked_loop(report))

    return work_watched


def _check_environment(configuration: Configuration) -> None:
    from fleetbus_workers.environment.keyed_specs import check_forms

    check_forms(configuration.run.environment)


@click.command("environment", cls=SettingsCommand)
@role_options
@settings_options("run", "nats", "environment", "reward", "fleet", "container", "limits", "log")
def command(**values: Any) -> int:
    """Start an environment worker: it plays requested episodes with the published policy and grades them.

    Install with `pip install 'fleetbus[environment]'`; needs no torch. SIGTERM or Ctrl-C: finish or return its episodes, then
    exit.
    """
    return run_role("environment", _load_work, values, check=_check_environment)
