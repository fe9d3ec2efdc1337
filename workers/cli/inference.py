"""``fleetbus inference``: one inference worker."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import anyio
import anyio.to_thread
import click

from workers.cli.options import SettingsCommand, settings_options
from workers.cli.role import Work, role_options, run_role

if TYPE_CHECKING:
    from fleetbus.bus.base import Bus
    from fleetbus.config.settings import Configuration


def _load_work() -> Work:
    from workers.cli.model import model_folder
    from workers.inference.template import ChatTemplate
    from workers.inference.torch import TorchSampler
    from workers.inference.worker import run_inference

    async def work(bus: Bus, configuration: Configuration, name: str, drain: anyio.Event) -> None:
        settings, folder = configuration.inference, model_folder(configuration.run)
        open_sampler = partial(
            TorchSampler, folder, slots=settings.batch, max_length=settings.max_length, threads=settings.threads
        )
        sampler = await anyio.to_thread.run_sync(open_sampler)
        template = await anyio.to_thread.run_sync(ChatTemplate, folder)
        await run_inference(bus, configuration=configuration, name=name, drain=drain, sampler=sampler, template=template)

    return work


@click.command("inference", cls=SettingsCommand)
@role_options
@settings_options("run", "nats", "inference", "limits", "log")
def command(**values: Any) -> int:
    """An inference worker: answers observations with sampled actions, and follows the published policy.

    Install with `pip install 'fleetbus[torch]'`. SIGTERM or Ctrl-C: hand over what it has, then exit.
    """
    return run_role("inference", _load_work, values)
