"""The work of an inference worker: its engine, the fetcher of published weights, and the worker around both."""

from contextlib import AsyncExitStack

import anyio

from fleetbus.bus.base import Bus
from fleetbus.config.settings import Configuration
from fleetbus.delivery.control import run_until_drained
from fleetbus.delivery.shared_slots import SharedSlots
from fleetbus_workers.assembly.engines import build_image_source, find_scratch_folder, launch_engine
from fleetbus_workers.assembly.vision import check_vision, load_local_tasks
from fleetbus_workers.inference.base import Sampler, Template
from fleetbus_workers.inference.worker import run_inference
from fleetbus_workers.weights.fetch import WeightsFetcher
from fleetbus_workers.weights.store import get_object_store
from fleetbus_workers.weights.transfer_choice import open_receiver


async def work(
    bus: Bus, configuration: Configuration, name: str, drain: anyio.Event, *, shared: SharedSlots | None = None
) -> None:
    """Answer observations with sampled actions until drained. ``shared`` has the slots of all runs that the process serves."""
    check_vision(configuration, load_local_tasks(configuration), role="inference")
    folder = find_scratch_folder(configuration, name)
    fetcher = WeightsFetcher(folder / "fetched", get_object_store(bus, configuration.run.name))
    engine = launch_engine(configuration, name)
    loaded: list[tuple[Sampler, Template]] = []

    async def load() -> None:
        loaded.append(await stack.enter_async_context(engine))

    try:
        async with AsyncExitStack() as stack:
            await run_until_drained(drain, load)
            if not loaded:  # asked to stop before it held anything: nothing is to be handed back
                return
            sampler, template = loaded[0]
            await run_inference(
                bus,
                configuration=configuration,
                name=name,
                drain=drain,
                sampler=sampler,
                template=template,
                fetch=fetcher.fetch_local,
                discard_copies=fetcher.discard_copies,
                images=build_image_source(template, bus, configuration.run.name),
                shared=shared,
                receiver=open_receiver(bus, configuration, sampler, get_object_store(bus, configuration.run.name)),
            )
    finally:
        fetcher.close()
