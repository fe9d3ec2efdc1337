"""Somebody who looks on, as `fleetbus monitor` and `metrics` do: it reads the run, and must not end before it is told to."""

from __future__ import annotations

import anyio

from fleetbus.bus.base import Bus
from fleetbus_schemas import Subjects
from fleetbus_workers.observe.run.run_observer import RunObserver
from fleetbus_workers.observe.run.state import RunState
from tests.simulation.platform.process import RUN, Process


async def watch(bus: Bus, process: Process) -> None:
    """Follow the run until the process is drained."""
    observer = RunObserver(bus, Subjects(RUN), RunState(steps=0))
    async with anyio.create_task_group() as group:
        group.start_soon(observer.run)
        await process.drain.wait()
        group.cancel_scope.cancel()
