"""``fleetbus cancel EPISODE...``: end episodes as cancelled, wherever they run. 0: all are over; 1: not all; 2: bad input."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from fleetbus_schemas import Subjects
from fleetbus_workers.cli.look.run_options import reach_options
from fleetbus_workers.cli.options import load_settings, validate_name
from fleetbus_workers.cli.output import json_option, print_json
from fleetbus_workers.command.event_loop import run_async
from fleetbus_workers.command.exit_status import REFUSED
from fleetbus_workers.run_access.log_access import open_run
from fleetbus_workers.run_access.server_address import generate_worker_name

if TYPE_CHECKING:
    from fleetbus.config.settings import Configuration
    from fleetbus.delivery.cancel import CancelResult

ALL_OVER, NOT_ALL = 0, 1


@click.command("cancel")
@click.argument("episodes", nargs=-1, required=True, metavar="EPISODE...")
@click.option("--run", "run__name", metavar="NAME", help="Name of the run [default]")
@json_option("what happened")
@reach_options
def command(episodes: tuple[str, ...], as_json: bool, **values: Any) -> int:
    """End episodes as cancelled: by the worker that runs them, or in the log if no worker does. They are never trained.

    Exit status 0: all of them have ended; 1: some have not; 2: some were never requested.
    """
    configuration = load_settings(values).configuration
    wanted = list(dict.fromkeys(validate_name("episode", episode) for episode in episodes))
    done = run_async(_cancel, configuration, wanted)
    print_json(done) if as_json else _print(done)
    states = {each.state for each in done}
    if "unknown" in states:
        return REFUSED
    return ALL_OVER if states <= {"cancelled", "over"} else NOT_ALL


async def _cancel(configuration: Configuration, episodes: Sequence[str]) -> list[CancelResult]:
    from fleetbus.delivery.cancel import cancel_episodes

    subjects, author = Subjects(configuration.run.name), generate_worker_name("cancel")
    async with open_run(configuration, "cancel") as bus:
        return await cancel_episodes(bus, subjects, episodes, author=author, close_seconds=configuration.limits.close + 5)


def _print(done: Sequence[CancelResult]) -> None:
    for each in done:
        sentence = {
            "cancelled": f"cancelled by {each.worker}",
            "over": f"was over already: {each.outcome}",
            "closing": f"stopped by {each.worker}, which is still closing its environment",
            "open": "not cancelled: it changed hands meanwhile, try again",
            "unknown": "was never requested",
        }[each.state]
        print(f"{each.episode_id}: {sentence}")
