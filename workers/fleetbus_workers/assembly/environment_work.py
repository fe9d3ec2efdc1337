"""The work of an environment worker: its environments, and the worker around them."""

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, nullcontext

import anyio
import anyio.to_thread

from fleetbus.bus.base import Bus
from fleetbus.config.settings import Configuration
from fleetbus_workers.assembly.environments import compose_rewards, open_environments
from fleetbus_workers.environment.adapter_context import EnvironmentFactory
from fleetbus_workers.environment.images.observation import StoreImage
from fleetbus_workers.environment.images.store import build_run_image_store
from fleetbus_workers.environment.ownership import sweep_abandoned_processes
from fleetbus_workers.environment.stepwise.host import SessionHost
from fleetbus_workers.environment.worker import run_environment


async def work(
    bus: Bus,
    configuration: Configuration,
    name: str,
    drain: anyio.Event,
    *,
    watch: AbstractAsyncContextManager[None] | None = None,
    keep_image: Callable[[StoreImage], StoreImage] = lambda store: store,
    on_hosting: Callable[[SessionHost], None] = lambda _: None,
) -> None:
    """Play episodes in the environments that ``run.environment`` names, until drained; what earlier workers left is ended
    first. ``watch`` is entered around the play, ``keep_image`` is put before the store of images, ``on_hosting`` is called when
    step-wise sessions are served."""
    store_image = build_run_image_store(bus, configuration) if configuration.environment.images else None
    if store_image is not None:
        store_image = keep_image(store_image)
    await anyio.to_thread.run_sync(sweep_abandoned_processes)
    environments = open_environments(configuration, store_image=store_image, sandbox=configuration.environment.sandbox)
    async with environments as factory, watch or nullcontext():
        await run_environment(bus, configuration=configuration, name=name, drain=drain, make=factory, on_hosting=on_hosting)


async def work_with(factory: EnvironmentFactory, bus: Bus, configuration: Configuration, name: str, drain: anyio.Event) -> None:
    """The same with a factory of the caller's."""
    async with compose_rewards(factory, configuration) as composed, composed.run():
        await run_environment(bus, configuration=configuration, name=name, drain=drain, make=composed)
