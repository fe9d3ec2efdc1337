"""Finds the attempts whose Action is late and can be found by looking: a worker reads the log once for many of them.

Each for itself, 20,000 attempts of 200 workers ask the server up to four questions each in every interval.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import suppress

import anyio
import structlog

from fleetbus.bus.base import Bus, WorkBus
from fleetbus.bus.streams import observations_consumer
from fleetbus.concurrency.task_groups import open_first_error_task_group
from fleetbus.errors import BusClosed, BusError
from fleetbus_schemas import ANY_LANE
from fleetbus_workers.environment.episode.lane_status import LaneStatus
from fleetbus_workers.environment.episode.policy_client import PolicyClient, Standing

CHECKS_AT_ONCE = 64
"""So many attempts share one read, of at most three subjects each (a server answers for 1,024). A worker has one under way."""

ANSWER_SECONDS = 2.0
"""What is asked besides is left to the next check when it is not answered by then."""

log = structlog.get_logger()


async def check_late_answers(bus: Bus, lane_status: LaneStatus, late: Sequence[PolicyClient], now: float) -> None:
    """Wake those who would find something; the others wait on. ``now`` is when they were late, by the loop's clock."""
    acked = dict.fromkeys((client.policy for client in late if client.looks_into_queue), 0)
    in_work: dict[str, Collection[str] | None] = dict.fromkeys(client.asked_worker for client in late if client.asked_worker)
    if acked or in_work:
        await _ask_around(bus, lane_status, acked, in_work)
    for start in range(0, len(late), CHECKS_AT_ONCE):
        some = late[start : start + CHECKS_AT_ONCE]
        try:
            entries = await bus.last_of_each([subject for client in some for subject in client.watched_subjects])
        except BusClosed:
            raise
        except BusError as error:
            log.warning("log read failed; retrying", late=len(late) - start, reason=str(error))
            return
        standing = Standing(last={entry.subject: entry.sequence for entry in entries}, acked=acked, in_work=in_work)
        for client in some:
            if client.is_late(now):  # it may have been answered meanwhile
                client.apply(standing)


async def _ask_around(
    bus: WorkBus, lane_status: LaneStatus, acked: dict[str, int], in_work: dict[str, Collection[str] | None]
) -> None:
    """Fill in what is answered in time; nobody's Action waits for who does not answer."""

    async def ask_floor(policy: str) -> None:
        with suppress(BusError):
            (floor,) = await bus.ack_floors([observations_consumer(policy, ANY_LANE)])
            acked[policy] = floor.ack_floor

    async def ask_turns(worker: str) -> None:
        turns = await lane_status.ask_turns(worker)
        in_work[worker] = frozenset(turns) if turns is not None else None

    with anyio.move_on_after(ANSWER_SECONDS):
        async with open_first_error_task_group() as tasks:
            for policy in tuple(acked):
                tasks.start_soon(ask_floor, policy)
            for worker in tuple(in_work):
                tasks.start_soon(ask_turns, worker)
