"""An engine's side of a transfer: takes what the learner offers in a thread, and gives it out when the log names its digests.

What has arrived counts for nothing until `CollectiveReceiver.take` has compared it with a version from the log, whose lineage
fences it. All that fails here is told and counted, and the engine reads the file.
"""

from __future__ import annotations

import threading
import time
from contextlib import closing
from typing import TYPE_CHECKING, NamedTuple

import anyio
import anyio.to_thread
import structlog

from fleetbus.bus.base import CallBus
from fleetbus.bus.objects import ObjectMissing, ObjectStore
from fleetbus.errors import BusError
from fleetbus_schemas import MalformedMessage, PolicyPublished, Subjects, WeightsOffered, decode
from fleetbus_workers.weights.collective.group import TransferFailed, join
from fleetbus_workers.weights.collective.received import ReceivedVersion
from fleetbus_workers.weights.collective.stream import receive_version
from fleetbus_workers.weights.file import WeightsRejected
from fleetbus_workers.weights.manifests import get_manifest

if TYPE_CHECKING:
    import torch

OFFERS_LIMIT = 8
"""Offers that wait; only the newest counts."""

log = structlog.get_logger()


class _Reception(NamedTuple):
    """One version on its way. ``result`` is filled before ``ended`` is set, if it came whole."""

    offered: WeightsOffered
    given_up: threading.Event
    ended: anyio.Event
    result: list[ReceivedVersion]


class CollectiveReceiver:
    """`fleetbus_workers.weights.transfer.WeightsReceiver` by torch.distributed. A version has ``limit_bytes`` at most, and is
    given up after ``seconds``. It holds two versions at most, each of them until it is taken or a later one was offered."""

    def __init__(
        self,
        bus: CallBus,
        subjects: Subjects,
        *,
        policy: str,
        limit_bytes: int,
        seconds: float,
        objects: ObjectStore | None = None,
    ) -> None:
        self._bus = bus
        self._subjects = subjects
        self._policy = policy
        self._limit_bytes = limit_bytes
        self._seconds = seconds
        self._objects = objects
        self._receptions: list[_Reception] = []

    async def run(self) -> None:
        """Follow offers until cancelled."""
        try:
            async with (
                self._bus.listen(self._subjects.transfer(self._policy), limit=OFFERS_LIMIT) as listener,
                anyio.create_task_group() as tasks,
            ):
                while True:
                    subject, payload = await listener.receive()
                    try:
                        offered = decode(WeightsOffered, payload, subject=subject)
                    except MalformedMessage as malformed:
                        log.warning("offer of weights is malformed; ignoring it", reason=malformed.reason)
                        continue
                    await self._give_up_but_one()
                    reception = _Reception(offered, threading.Event(), anyio.Event(), [])
                    self._receptions.append(reception)
                    tasks.start_soon(self._receive, reception)
        finally:
            for reception in self._receptions:
                reception.given_up.set()
            self._receptions.clear()

    async def take(self, published: PolicyPublished) -> dict[str, torch.Tensor] | None:
        """The tensors of a version of the log, checked as those of its file are, or None: the file is to be read. Waits while
        they arrive. They are given once."""
        reception = self._find(published)
        if reception is None:
            return None
        await reception.ended.wait()
        if reception in self._receptions:
            self._receptions.remove(reception)
        if not reception.result:
            return None
        try:
            if published.manifest_object and self._objects is not None:
                published = await get_manifest(self._objects, published)
            tensors = reception.result[0].take_tensors("what the learner sent", published.manifest)
        except (WeightsRejected, OSError, ObjectMissing, BusError, ValueError) as error:
            log.warning("transferred weights rejected; reading the file", version=published.version, reason=str(error))
            return None
        log.info("weights taken from the learner", version=published.version)
        return tensors

    def _find(self, published: PolicyPublished) -> _Reception | None:
        for reception in self._receptions:
            if (reception.offered.lineage, reception.offered.version) == (published.lineage, published.version):
                return reception
        return None

    async def _give_up_but_one(self) -> None:
        """Before another version comes: keep of those before the newest that is whole, for the engine may be about to take it,
        and wait for the threads of the others."""
        whole = [reception for reception in self._receptions if reception.result]
        for reception in self._receptions:
            if reception not in whole:
                reception.given_up.set()
                await reception.ended.wait()
        self._receptions = [reception for reception in self._receptions if reception.result][-1:]

    async def _receive(self, reception: _Reception) -> None:
        offered, started = reception.offered, time.monotonic()

        def receive() -> ReceivedVersion:
            with closing(join(offered.address, offered.port, offered.token)) as group:
                return receive_version(
                    group, limit_bytes=self._limit_bytes, ends=started + self._seconds, is_over=reception.given_up.is_set
                )

        try:
            version = await anyio.to_thread.run_sync(receive, abandon_on_cancel=True, limiter=anyio.CapacityLimiter(1))
            reception.result.append(version)
        except TransferFailed as failed:
            log.warning("weights transfer failed; reading the file", version=offered.version, reason=str(failed))
        finally:
            reception.ended.set()
