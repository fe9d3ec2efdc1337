"""``fleetbus pause [RUN]``: let the learner request no new episodes, or resume. 0: done; 1: no answer; 2: bad input."""

from typing import Any

import click

from fleetbus.config.settings import Configuration
from fleetbus.errors import RequestUnanswered
from fleetbus_schemas import Subjects
from fleetbus_workers.cli.look.run_options import reach_options, run_argument
from fleetbus_workers.cli.options import load_settings
from fleetbus_workers.command.event_loop import run_async
from fleetbus_workers.command.exit_status import REFUSED
from fleetbus_workers.run_access.log_access import open_run
from fleetbus_workers.run_access.server_address import generate_worker_name

DONE, UNANSWERED = 0, 1


@click.command("pause")
@run_argument
@click.option("--resume", is_flag=True, help="Request episodes again")
@reach_options
def command(run: str | None, resume: bool, **values: Any) -> int:
    """Let the learner of a run request no new episodes, until --resume: what was requested is played and trained.

    For maintenance of what environments or engines need. Evaluations that are due are still played. A learner that is started
    anew is not paused.

    Exit status 0: done; 1: the learner does not answer; 2: bad input, or no learner works on the run.
    """
    configuration = load_settings({**values, "run__name": run}).configuration
    name = configuration.run.name
    try:
        learner = run_async(_pause, configuration, not resume)
    except RequestUnanswered:
        print(f"run {name}: the learner does not answer")
        return UNANSWERED
    if learner is None:
        print(f"run {name}: no learner works on it")
        return REFUSED
    print(f"{learner}: admission {'resumed' if resume else f'paused, until `fleetbus pause {name} --resume`'}")
    return DONE


async def _pause(configuration: Configuration, is_paused: bool) -> str | None:
    from fleetbus.delivery.cancel import pause_admission

    async with open_run(configuration, "pause") as bus:
        subjects, author = Subjects(configuration.run.name), generate_worker_name("pause")
        return await pause_admission(bus, subjects, is_paused=is_paused, author=author)
