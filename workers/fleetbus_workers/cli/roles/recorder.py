"""``fleetbus recorder --archive DIR``: archive the log, and keep it below its limit."""

from pathlib import Path
from typing import Any

import anyio
import click

from fleetbus.bus.base import Bus
from fleetbus.config.settings import Configuration
from fleetbus_workers.assembly.work import Work
from fleetbus_workers.cli.options import SettingsCommand, settings_options
from fleetbus_workers.cli.roles.role import role_options, run_role


@click.command("recorder", cls=SettingsCommand)
@click.option(
    "--archive",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="DIR",
    required=True,
    help="Folder of this run's archive; created if missing, continued if it exists",
)
@role_options
@settings_options("run", "nats", "recorder", "limits", "log")
def command(archive: Path, **values: Any) -> int:
    """Start a recorder: it archives a run's log and keeps the log small by removing what is archived and settled.

    One per run. SIGTERM or Ctrl-C: archive the rest of the log, then exit. A new recorder continues at the end of the archive.
    By default the archive is kept for ever (--recorder-keep-hours, --recorder-keep-bytes).
    Pass the folder to the learner, too (--learner-archive): to resume from an older checkpoint it needs the removed entries.
    """

    def load_work() -> Work:
        from fleetbus_workers.recorder.worker import run_recorder

        async def work(bus: Bus, configuration: Configuration, name: str, drain: anyio.Event) -> None:
            await run_recorder(bus, configuration=configuration, name=name, drain=drain, folder=archive)

        return work

    return run_role("recorder", load_work, values)
