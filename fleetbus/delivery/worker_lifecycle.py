"""Lifecycle of one worker: start and stop are stored in the log, heartbeats are broadcast, the lane lease is renewed with them.

A gateway stores nothing, so that its key cannot fill the log: its last heartbeat says that it goes
(docs/decisions/0187-gateways-store-nothing.md).
"""

import os
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import anyio
import msgspec
import structlog

from fleetbus.bus.base import Bus, LogBus
from fleetbus.concurrency.task_groups import open_first_error_task_group
from fleetbus.delivery.heartbeats import HEARTBEAT_SECONDS
from fleetbus.delivery.lanes import Lane
from fleetbus.errors import BusError
from fleetbus.package_version import read_fleetbus_version
from fleetbus_schemas import (
    Heartbeat,
    Message,
    SlotShare,
    Subjects,
    WorkerDraining,
    WorkerFailed,
    WorkerRole,
    WorkerStarted,
    WorkerStopped,
    encode,
)
from fleetbus_schemas.protocol import PROTOCOL

log = structlog.get_logger()


class WorkerLifecycle:
    """The lifecycle messages of one worker. ``beat`` makes the current heartbeat."""

    def __init__(
        self, bus: Bus, subjects: Subjects, *, role: WorkerRole, worker: str, beat: Callable[[], Heartbeat], lane: Lane | None
    ) -> None:
        self._bus = bus
        self._subjects = subjects
        self._role = role
        self._worker = worker
        self._beat = beat
        self._lane = lane
        self._version = read_fleetbus_version()

    async def publish_started(self, *, slots: int, share: SlotShare | None = None) -> None:
        await self._publish_entry(
            WorkerStarted(
                role=self._role,
                worker=self._worker,
                slots=slots,
                lane=self._lane.name if self._lane else "",
                host=socket.gethostname(),
                pid=os.getpid(),
                version=self._version,
                protocol=PROTOCOL,
                share=share,
            )
        )
        log.info("ready", slots=slots)

    async def publish_draining(self, *, in_flight: int) -> None:
        """Store the entry and broadcast a heartbeat at once."""
        log.info("draining", in_flight=in_flight)
        await self._publish_entry(WorkerDraining(role=self._role, worker=self._worker, in_flight=in_flight))
        await self.publish_heartbeat()

    async def publish_stopped(self) -> None:
        await self._publish_entry(WorkerStopped(role=self._role, worker=self._worker))
        if self._role == "gateway":
            await self._broadcast(msgspec.structs.replace(self._beat(), draining=True))
        log.info("stopped")

    async def publish_failed(self, error: BaseException) -> None:
        while isinstance(error, BaseExceptionGroup):  # of what its tasks met, the first is nearest to the cause
            error = error.exceptions[0]
        await self._publish_entry(
            WorkerFailed(role=self._role, worker=self._worker, error_class=type(error).__name__, error=str(error)[:500])
        )

    async def publish_heartbeat(self) -> None:
        await self._broadcast(self._beat())

    async def _broadcast(self, beat: Heartbeat) -> None:
        problem = beat.problem or self._bus.storing_problem
        told = msgspec.structs.replace(beat, problem=problem, version=self._version, protocol=PROTOCOL)
        await self._bus.broadcast(self._subjects.heartbeat(self._role, self._worker), encode(told))

    async def run(self) -> None:
        """Send heartbeats and renew the lane until cancelled; raises `LaneLost` when this worker has been replaced. A renewal
        that the server leaves without an answer must not silence the heartbeats, which say so."""
        async with open_first_error_task_group() as tasks:
            if self._lane is not None:
                tasks.start_soon(self._renew, self._lane)
            while True:
                await self.publish_heartbeat()
                await anyio.sleep(HEARTBEAT_SECONDS)

    async def _renew(self, lane: Lane) -> None:
        while True:
            await lane.renew(self._bus)
            await anyio.sleep(HEARTBEAT_SECONDS)

    async def _publish_entry(self, message: Message) -> None:
        """Lifecycle entries inform; a log that is full or away must not stop a worker because of them."""
        if self._role == "gateway":
            return
        subject = self._subjects.life(self._role, self._worker)
        try:
            await self._bus.publish(subject, encode(message), timeout=5.0)
        except BusError as error:
            log.warning("lifecycle publish failed; continuing without it", entry=type(message).__name__, reason=str(error))


@asynccontextmanager
async def run_lifecycle(
    lifecycle: WorkerLifecycle, bus: LogBus, lane: Lane | None, *, slots: int, share: SlotShare | None = None
) -> AsyncIterator[None]:
    """Publish the start, send heartbeats until the body ends, publish the stop or the failure, release the lane."""
    try:
        await lifecycle.publish_started(slots=slots, share=share)
        async with anyio.create_task_group() as group:
            group.start_soon(lifecycle.run)
            yield
            group.cancel_scope.cancel()
    except Exception as error:  # published, then raised again
        with anyio.move_on_after(5, shield=True):
            await lifecycle.publish_failed(error)
        raise
    else:
        with anyio.move_on_after(5, shield=True):
            await lifecycle.publish_stopped()
    finally:
        if lane is not None:
            with anyio.move_on_after(3, shield=True):
                await lane.release(bus)
