"""The side of an engine with processes of its own: they join the group, and keep what came until the log names its digests."""

from __future__ import annotations

import threading

import structlog

from fleetbus.bus.base import CallBus
from fleetbus.bus.objects import ObjectMissing, ObjectStore
from fleetbus.errors import BusError
from fleetbus_schemas import PolicyPublished, Subjects, WeightsOffered
from fleetbus_workers.weights.collective.offers import OfferFollower
from fleetbus_workers.weights.transfer import Fetch, ReceivesVersions

log = structlog.get_logger()


class EngineReceiver(OfferFollower[str]):
    """`fleetbus_workers.weights.transfer.WeightsReceiver` for ``sampler``; what it holds of a version is the offer's token."""

    def __init__(
        self,
        bus: CallBus,
        subjects: Subjects,
        sampler: ReceivesVersions,
        *,
        policy: str,
        seconds: float,
        objects: ObjectStore | None = None,
    ) -> None:
        super().__init__(bus, subjects, policy=policy, objects=objects)
        self._sampler = sampler
        self._seconds = seconds

    @property
    def processes(self) -> int:
        """See `WeightsReceiver`."""
        return self._sampler.receiving_processes

    async def load(self, published: PolicyPublished, fetch: Fetch) -> bool:
        """See `WeightsReceiver`."""
        token = await self._take_result(published)
        if token is None:
            return False
        try:
            complete = await self._complete(published)
        except (OSError, ObjectMissing, BusError, ValueError) as error:
            log.warning("manifest cannot be had; reading the file", version=published.version, reason=str(error))
            return False
        if not await self._sampler.load_received(token, complete, fetch):
            return False
        log.info("weights taken from the learner", version=published.version)
        return True

    async def _receive(self, offered: WeightsOffered, given_up: threading.Event) -> str:
        await self._sampler.receive_version(offered, self._seconds, given_up)
        return offered.token
