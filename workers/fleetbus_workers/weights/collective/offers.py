"""Follows the offers of a learner and has each version received: the part of an engine's side that does not know where to.

What has arrived counts for nothing until it has been compared with a version from the log, whose lineage fences it. All that
fails here is told and counted, and the engine reads the file.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from typing import Generic, TypeVar

import anyio
import structlog

from fleetbus.bus.base import CallBus
from fleetbus.bus.objects import ObjectStore
from fleetbus_schemas import MalformedMessage, PolicyPublished, Subjects, WeightsOffered, decode
from fleetbus_workers.weights.manifests import get_manifest
from fleetbus_workers.weights.transfer import TransferFailed

OFFERS_LIMIT = 8
"""Offers that wait; only the newest counts."""

T = TypeVar("T")

log = structlog.get_logger()


class _Reception(Generic[T]):
    """One version on its way. ``result`` is filled before ``ended`` is set, if it came whole."""

    def __init__(self, offered: WeightsOffered) -> None:
        self.offered = offered
        self.given_up = threading.Event()
        self.ended = anyio.Event()
        self.result: list[T] = []


class OfferFollower(ABC, Generic[T]):
    """A version that came whole is a ``T``. Two versions are held at most, each of them until it is taken or a later one was
    offered."""

    def __init__(self, bus: CallBus, subjects: Subjects, *, policy: str, objects: ObjectStore | None = None) -> None:
        self._bus = bus
        self._subjects = subjects
        self._policy = policy
        self._objects = objects
        self._receptions: list[_Reception[T]] = []

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
                    reception: _Reception[T] = _Reception(offered)
                    self._receptions.append(reception)
                    tasks.start_soon(self._run_reception, reception)
        finally:
            for reception in self._receptions:
                reception.given_up.set()
            self._receptions.clear()

    @abstractmethod
    async def _receive(self, offered: WeightsOffered, given_up: threading.Event) -> T:
        """Receive a version; ends soon after ``given_up`` is set. Raises `TransferFailed`."""

    async def _take_result(self, published: PolicyPublished) -> T | None:
        """The whole version of the log that came, once; None: nothing came, or not all of it. Waits while it arrives."""
        reception = self._find(published)
        if reception is None:
            return None
        await reception.ended.wait()
        if reception in self._receptions:
            self._receptions.remove(reception)
        return reception.result[0] if reception.result else None

    async def _complete(self, published: PolicyPublished) -> PolicyPublished:
        """The version with its manifest. Raises as `get_manifest`."""
        if published.manifest_object and self._objects is not None:
            return await get_manifest(self._objects, published)
        return published

    def _find(self, published: PolicyPublished) -> _Reception[T] | None:
        for reception in self._receptions:
            if (reception.offered.lineage, reception.offered.version) == (published.lineage, published.version):
                return reception
        return None

    async def _give_up_but_one(self) -> None:
        """Before another version comes: keep of those before the newest that is whole, for the engine may be about to take it,
        and wait for the others to end."""
        whole = [reception for reception in self._receptions if reception.result]
        for reception in self._receptions:
            if reception not in whole:
                reception.given_up.set()
                await reception.ended.wait()
        self._receptions = [reception for reception in self._receptions if reception.result][-1:]

    async def _run_reception(self, reception: _Reception[T]) -> None:
        try:
            reception.result.append(await self._receive(reception.offered, reception.given_up))
        except TransferFailed as failed:
            log.warning("weights transfer failed; reading the file", version=reception.offered.version, reason=str(failed))
        finally:
            reception.ended.set()
