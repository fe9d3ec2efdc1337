"""A worker whose protocol does not fit the run says so, and waits until it does, instead of working.

Above it is whoever starts a role; below it the bus. It takes no lane and no work, and stores nothing: its heartbeats alone say
that it is there and why it waits (docs/decisions/0217-a-protocol-version-in-the-run.md).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import anyio
import structlog

from fleetbus.bus.base import CallBus
from fleetbus.delivery.heartbeats import HEARTBEAT_SECONDS
from fleetbus.errors import BusClosed, BusError
from fleetbus.package_version import read_fleetbus_version
from fleetbus_schemas import Heartbeat, Subjects, WorkerRole, encode
from fleetbus_schemas.protocol import OWN, ProtocolVersion, find_misfit

log = structlog.get_logger()


async def wait_for_protocol(
    bus: CallBus,
    read_run: Callable[[], Awaitable[ProtocolVersion]],
    subjects: Subjects,
    *,
    role: WorkerRole,
    worker: str,
    drain: anyio.Event,
    own: ProtocolVersion = OWN,
) -> bool:
    """True as soon as this program may work in the run, False if ``drain`` was set before. ``read_run`` gives the run's
    protocol, as often as it is asked; while the server does not answer, nothing is decided.

    Raises `BusClosed`.
    """
    said = ""
    while not drain.is_set():
        try:
            misfit = find_misfit(own, await read_run(), subjects.run)
        except BusClosed:
            raise
        except BusError as error:
            misfit = f"the protocol of run {subjects.run} cannot be read: {error}"
        if not misfit:
            if said:
                log.info("the protocol fits the run now; beginning", protocol=own.protocol)
            return True
        if misfit != said:
            log.warning(f"waiting: {misfit}")
            said = misfit
        beat = Heartbeat(role=role, worker=worker, problem=misfit, protocol=own.protocol, version=read_fleetbus_version())
        await bus.broadcast(subjects.heartbeat(role, worker), encode(beat))
        with anyio.move_on_after(HEARTBEAT_SECONDS):
            await drain.wait()
    return False
