"""A worker shows that it lives: start and stop go to the log, heartbeats to whoever listens, its lane is renewed with them."""

from __future__ import annotations

import os
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import anyio
import structlog

from fleetbus.bus.base import Bus
from fleetbus.errors import BusError
from fleetbus.lanes import Lane
from fleetbus_schemas import (
    Heartbeat,
    Message,
    Subjects,
    WorkerDraining,
    WorkerFailed,
    WorkerRole,
    WorkerStarted,
    WorkerStopped,
    encode,
)

HEARTBEAT_SECONDS = 2.0

log = structlog.get_logger()


class Presence:
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

    async def started(self, *, slots: int) -> None:
        await self._record(
            WorkerStarted(
                role=self._role,
                worker=self._worker,
                slots=slots,
                lane=self._lane.name if self._lane else "",
                host=socket.gethostname(),
                pid=os.getpid(),
            )
        )
        log.info("ready", slots=slots)

    async def draining(self, *, in_flight: int) -> None:
        """Tell the log, and everybody who listens at once."""
        log.info("draining", in_flight=in_flight)
        await self._record(WorkerDraining(role=self._role, worker=self._worker, in_flight=in_flight))
        await self.beat_once()

    async def stopped(self) -> None:
        await self._record(WorkerStopped(role=self._role, worker=self._worker))
        log.info("stopped")

    async def failed(self, error: BaseException) -> None:
        while isinstance(error, BaseExceptionGroup):  # of what its tasks met, the first tells most
            error = error.exceptions[0]
        await self._record(
            WorkerFailed(role=self._role, worker=self._worker, error_class=type(error).__name__, error=str(error)[:500])
        )

    async def beat_once(self) -> None:
        await self._bus.broadcast(self._subjects.heartbeat(self._role, self._worker), encode(self._beat()))

    async def run(self) -> None:
        """Heartbeats and lane renewals, for ever; raises `LaneLost` when this worker has been replaced."""
        while True:
            await self.beat_once()
            if self._lane is not None:
                await self._lane.renew(self._bus)
            await anyio.sleep(HEARTBEAT_SECONDS)

    async def _record(self, message: Message) -> None:
        """Lifecycle entries inform; a log that is full or away must not stop a worker because of them."""
        subject = self._subjects.life(self._role, self._worker)
        try:
            await self._bus.publish(subject, encode(message), timeout=5.0)
        except BusError as error:
            log.warning("lifecycle entry not stored", entry=type(message).__name__, reason=str(error))


@asynccontextmanager
async def present(presence: Presence, bus: Bus, lane: Lane | None, *, slots: int) -> AsyncIterator[None]:
    """A worker's working life: says hello, beats until the body ends, says goodbye or why it failed, frees its lane."""
    try:
        await presence.started(slots=slots)
        async with anyio.create_task_group() as group:
            group.start_soon(presence.run)
            yield
            group.cancel_scope.cancel()
    except Exception as error:
        with anyio.move_on_after(5, shield=True):
            await presence.failed(error)
        raise
    else:
        with anyio.move_on_after(5, shield=True):
            await presence.stopped()
    finally:
        if lane is not None:
            with anyio.move_on_after(3, shield=True):
                await lane.release(bus)
