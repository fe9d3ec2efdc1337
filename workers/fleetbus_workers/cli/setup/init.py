"""``fleetbus init``: declare a run's streams and consumers on a server that is not ours."""

from typing import Any

import click
import msgspec

from fleetbus.auth.access import build_access
from fleetbus.bus.streams import RunPlan
from fleetbus.config.settings import Configuration
from fleetbus_workers.cli.options import SettingsCommand, load_settings, settings_options
from fleetbus_workers.cli.output import json_option
from fleetbus_workers.command.event_loop import run_async
from fleetbus_workers.command.noted_operations import store_notes
from fleetbus_workers.run_access.server_address import generate_worker_name, resolve_server_url


@click.command("init", cls=SettingsCommand)
@json_option("what was declared")
@settings_options("run", "nats")
def command(as_json: bool, **values: Any) -> None:
    """Declare a run's streams and consumers on a NATS server. Repeating it is harmless; `fleetbus up` does it itself."""
    configuration = load_settings(values).configuration
    plan = run_async(_declare, configuration)
    _show(plan, as_json)


async def _declare(configuration: Configuration) -> RunPlan:
    from fleetbus.bus.nats import connect
    from fleetbus_workers.up.process_plans import build_stream_plan

    plan = build_stream_plan(configuration)
    url = resolve_server_url(configuration)
    access = build_access("init", configuration.nats.auth, configuration.run.name)
    async with connect(url, run=configuration.run.name, role="init", worker=generate_worker_name("init"), **access) as bus:
        await bus.declare(plan)
        await store_notes(bus, configuration)
    return access["plan_on_server"](plan) if "plan_on_server" in access else plan


def _show(plan: RunPlan, as_json: bool) -> None:
    if as_json:
        print(msgspec.json.encode(plan).decode())
    else:
        print(f"run {plan.run}: streams {plan.log.name} and {plan.lanes.name}, {len(plan.consumers)} consumers")
