"""``fleetbus up``: everything on this machine."""

from pathlib import Path
from typing import Any

import click

from fleetbus_workers.cli.options import SettingsCommand, load_settings, settings_options


@click.command("up", cls=SettingsCommand)
@click.option(
    "--json-summary", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE", help="Also write the summary to FILE"
)
@click.option("--fresh", is_flag=True, help="Remove what the run of this name has so far, and begin anew")
@click.option("--check/--no-check", default=True, help="First play an episode of your environment class, for a second at most")
@click.option("--monitor/--no-monitor", default=True, help="Serve a web page about the run while it runs, on loopback")
@settings_options(
    "run", "nats", "learner", "algorithm", "trainer", "tinker", "weights", "environment", "inference", "episode", "evaluation",
    "reward", "limits", "container", "fleet", "log",
)  # fmt: skip
def command(json_summary: Path | None, fresh: bool, check: bool, monitor: bool, **values: Any) -> int:
    """Train on this machine: start a NATS server, environment and inference workers, and the learner.

    Trains the starter policy on the warehouse tasks, or yours: --model PATH --tasks FILE --environment SPEC. Ctrl-C stops the
    run cleanly; the same command resumes it. transformers' from_pretrained loads the model folder of a finished run.
    """
    from fleetbus_workers.cli.train.up_page import serve_page
    from fleetbus_workers.up.command import run_up

    loaded = load_settings(values, earlier=not fresh)
    return run_up(loaded, json_summary, fresh=fresh, plays=check, page=serve_page if monitor else None)
