"""``fleetbus environment``: one environment worker."""

from __future__ import annotations

from typing import Any

import click

from fleetbus_workers.assembly.work import Work
from fleetbus_workers.cli.options import SettingsCommand, settings_options
from fleetbus_workers.cli.role import role_options, run_role


def _load_work() -> Work:
    from fleetbus_workers.assembly.environment_work import work

    return work


@click.command("environment", cls=SettingsCommand)
@role_options
@settings_options("run", "nats", "environment", "fleet", "container", "limits", "log")
def command(**values: Any) -> int:
    """Start an environment worker: it plays requested episodes with the published policy and grades them.

    Install with `pip install 'fleetbus[environment]'`; needs no torch. SIGTERM or Ctrl-C: finish or return its episodes, then
    exit.
    """
    return run_role("environment", _load_work, values)
