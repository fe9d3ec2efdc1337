"""The learner's side of a transfer: offers each version to the engines that it has heard of, and sends it in a thread.

Publication goes on as if nobody came: the thread reads the file that is written anyway. There is one thread at most, for the
newest version; a version that is still on its way when the next one is begun is given up, and its engines read the file.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing

import anyio
import anyio.to_thread
import structlog
from anyio.abc import TaskGroup

from fleetbus.bus.base import CallBus
from fleetbus.concurrency.runtime import Runtime
from fleetbus.core.training.engine_pressure import MOST_ENGINES
from fleetbus.delivery.heartbeats import SILENT_AFTER_SECONDS, follow_heartbeats
from fleetbus.errors import UserError
from fleetbus_schemas import Heartbeat, Subjects, WeightsOffered, encode
from fleetbus_workers.weights.collective.group import Rendezvous
from fleetbus_workers.weights.collective.stream import send_version
from fleetbus_workers.weights.collective.written_file import WrittenFile
from fleetbus_workers.weights.transfer import ENGINE_COUNTER, PROCESSES_COUNTER, TransferFailed

LEAVE_SECONDS = 1.0
"""What a transfer that is given up gets to end, before the next version goes by file alone."""

MOST_PROCESSES = 64
"""Of one engine, whatever it says."""

log = structlog.get_logger()


class CollectiveSender:
    """`fleetbus_workers.weights.transfer.WeightsSender` by torch.distributed. ``address`` is that of this machine on a private
    network; a transfer that is not done after ``seconds`` is given up."""

    def __init__(
        self, bus: CallBus, subjects: Subjects, *, policy: str, address: str, seconds: float, runtime: Runtime
    ) -> None:
        self._bus = bus
        self._subjects = subjects
        self._policy = policy
        self._address = address
        self._seconds = seconds
        self._runtime = runtime
        self._heard: dict[str, tuple[float, int]] = {}
        """By engine when it was heard, and how many processes of it join a transfer."""
        self._tasks: TaskGroup | None = None
        self._source: WrittenFile | None = None
        self._ended = anyio.Event()
        self._ended.set()
        self.sent = 0

    @asynccontextmanager
    async def run(self) -> AsyncIterator[None]:
        """Hear of engines, and own the thread. Leaving gives up what is on its way. Raises `UserError` for an address that is
        not this machine's."""
        try:
            await anyio.to_thread.run_sync(Rendezvous, self._address, "")
        except OSError as error:
            raise UserError(f"weights.transfer_address = {self._address}: cannot listen there: {error}") from error
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(follow_heartbeats, self._bus, self._subjects.heartbeat("inference", "*"), self._hear)
            self._tasks = tasks
            try:
                yield
            finally:
                self._tasks = None
                if self._source is not None:
                    self._source.give_up()
                tasks.cancel_scope.cancel()

    async def offer(self, version: int, lineage: str) -> WrittenFile | None:
        """Offer a version that is about to be written. Returns who has to be told of the writing, None if nobody would come."""
        if not await self._end_previous() or self._tasks is None:
            return None
        now = anyio.current_time()
        expected = sum(processes for heard, processes in self._heard.values() if now - heard < SILENT_AFTER_SECONDS)
        if not expected:
            return None
        token = self._runtime.nonce()
        try:
            rendezvous = await anyio.to_thread.run_sync(Rendezvous, self._address, token)
        except OSError as error:  # no more descriptors, or the network is gone: the file is written all the same
            log.warning("weights cannot be offered; engines read the file", version=version, reason=str(error))
            return None
        offered = WeightsOffered(
            policy=self._policy, version=version, lineage=lineage, address=self._address, port=rendezvous.port, token=token
        )
        await self._bus.broadcast(self._subjects.transfer(self._policy), encode(offered))
        self._source, self._ended = WrittenFile(), anyio.Event()
        self._tasks.start_soon(self._send, rendezvous, self._source, expected, version, self._ended)
        return self._source

    async def _end_previous(self) -> bool:
        """False if the transfer before does not end, as when a peer was stopped in the middle of a piece."""
        if self._source is not None:
            self._source.give_up()
        with anyio.move_on_after(LEAVE_SECONDS):
            await self._ended.wait()
        if not self._ended.is_set():
            log.warning("the transfer before has not ended; engines read the file")
        return self._ended.is_set()

    async def _send(self, rendezvous: Rendezvous, source: WrittenFile, expected: int, version: int, ended: anyio.Event) -> None:
        """Errors of a transfer are told and end nothing: the file is there."""
        started = time.monotonic()

        def send() -> int:
            try:
                group = rendezvous.gather(expected, lambda: source.is_over)
                if group is None:
                    return 0
                with closing(group):
                    return send_version(group, source, started + self._seconds)
            finally:
                source.close()

        try:
            size = await anyio.to_thread.run_sync(send, abandon_on_cancel=True, limiter=anyio.CapacityLimiter(1))
        except TransferFailed as failed:
            log.warning("weights transfer failed; engines read the file", version=version, reason=str(failed))
        else:
            self.sent += bool(size)
            log.info("weights sent", version=version, bytes=size, seconds=round(time.monotonic() - started, 3))
        finally:
            ended.set()

    def _hear(self, beat: Heartbeat) -> None:
        """Only engines that take transfers count."""
        if ENGINE_COUNTER in beat.counters and not beat.draining:
            self._heard.pop(beat.worker, None)
            processes = beat.counters.get(PROCESSES_COUNTER, 1.0)
            self._heard[beat.worker] = (anyio.current_time(), int(min(max(processes, 1.0), MOST_PROCESSES)))
            if len(self._heard) > MOST_ENGINES:
                del self._heard[next(iter(self._heard))]
        else:
            self._heard.pop(beat.worker, None)
