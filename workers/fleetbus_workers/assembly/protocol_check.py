"""Holds a worker of another protocol back from a run: it says so, and waits until the run or its release is another.

Releases are brought to a cluster machine by machine. A worker that comes before its run was declared anew, or that a supervisor
starts again after that, would harm the run if it worked, and be restarted without end if it exited. See
docs/decisions/0213-a-run-has-a-protocol.md.
"""

from __future__ import annotations

import anyio
import structlog

from fleetbus.bus.base import LogBus
from fleetbus.release import read_fleetbus_version
from fleetbus_schemas.protocol import PROTOCOL

CHECK_SECONDS = 10.0

log = structlog.get_logger()


async def wait_for_protocol(bus: LogBus, run: str, drain: anyio.Event) -> bool:
    """True when the run has the protocol of this release, False if it was drained before that."""
    told = 0
    while not drain.is_set():
        declared = (await bus.log_state()).protocol
        if declared == PROTOCOL:
            return True
        if declared != told:
            told = declared
            log.error(
                describe_difference(run, declared),
                run_protocol=declared,
                own_protocol=PROTOCOL,
                release=read_fleetbus_version(),
            )
        with anyio.move_on_after(CHECK_SECONDS):
            await drain.wait()
    return False


def describe_difference(run: str, declared: int) -> str:
    """One line: what differs, and what to do."""
    if declared > PROTOCOL:
        return "waiting: this worker is too old for its run, which a later release has declared: update this worker"
    return (
        f"waiting: this worker is too new for its run, which an earlier release has declared: `fleetbus init --run {run}` of "
        "this release declares it anew, once the workers of the other have stopped"
    )
