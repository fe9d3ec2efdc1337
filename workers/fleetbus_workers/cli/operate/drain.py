"""``fleetbus drain WORKER...``: let workers finish or hand back what they have. 0: all drain; 1: some hang; 2: unknown."""

from collections.abc import Sequence
from typing import Any

import click
import msgspec

from fleetbus.config.settings import Configuration
from fleetbus_schemas import Subjects
from fleetbus_workers.cli.look.run_options import reach_options
from fleetbus_workers.cli.options import load_settings, validate_name
from fleetbus_workers.cli.output import json_option
from fleetbus_workers.command.event_loop import run_async
from fleetbus_workers.command.exit_status import REFUSED
from fleetbus_workers.run_access.log_access import open_run
from fleetbus_workers.run_access.server_address import generate_worker_name

DRAINS, HANGS = 0, 1


@click.command("drain")
@click.argument("workers", nargs=-1, required=True, metavar="WORKER...")
@click.option("--run", "run__name", metavar="NAME", help="Name of the run [default]")
@json_option("what happened")
@reach_options
def command(workers: tuple[str, ...], as_json: bool, **values: Any) -> int:
    """Let workers finish or release their work, then stop: like SIGTERM, from any machine.

    A running `fleetbus up` does not start them again; it does when it is resumed.

    Exit status 0: all of them drain; 1: some do not answer; 2: some were not found.
    """
    configuration = load_settings(values).configuration
    wanted = list(dict.fromkeys(validate_name("worker", worker) for worker in workers))
    states = run_async(_drain, configuration, wanted)
    _print(states, as_json)
    if "unknown" in states.values():
        return REFUSED
    return HANGS if "unanswered" in states.values() else DRAINS


async def _drain(configuration: Configuration, workers: Sequence[str]) -> dict[str, str]:
    from fleetbus.delivery.cancel import drain_workers

    async with open_run(configuration, "drain") as bus:
        return await drain_workers(bus, Subjects(configuration.run.name), workers, author=generate_worker_name("drain"))


def _print(states: dict[str, str], as_json: bool) -> None:
    if as_json:
        print(msgspec.json.encode(states).decode())
        return
    for worker, state in states.items():
        sentence = {"unknown": "no worker of that name is there", "unanswered": "does not answer"}
        print(f"{worker}: {sentence.get(state, f'{state} worker, drains')}")
