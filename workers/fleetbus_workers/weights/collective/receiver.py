"""The side of an engine that computes in this process: a thread joins the group, and the sampler is handed the tensors."""

from __future__ import annotations

import threading
import time
from contextlib import closing
from typing import TYPE_CHECKING

import anyio
import anyio.to_thread
import structlog

from fleetbus.bus.base import CallBus
from fleetbus.bus.objects import ObjectMissing, ObjectStore
from fleetbus.errors import BusError
from fleetbus_schemas import PolicyPublished, Subjects, WeightsOffered
from fleetbus_workers.weights.collective.group import join
from fleetbus_workers.weights.collective.offers import OfferFollower
from fleetbus_workers.weights.collective.received import ReceivedVersion
from fleetbus_workers.weights.collective.stream import receive_version
from fleetbus_workers.weights.file import WeightsRejected
from fleetbus_workers.weights.transfer import Fetch, TakesTensors

if TYPE_CHECKING:
    import torch

log = structlog.get_logger()


class CollectiveReceiver(OfferFollower[ReceivedVersion]):
    """`fleetbus_workers.weights.transfer.WeightsReceiver` for ``sampler``. A version is given up after ``seconds``."""

    processes = 1

    def __init__(
        self,
        bus: CallBus,
        subjects: Subjects,
        sampler: TakesTensors,
        *,
        policy: str,
        seconds: float,
        objects: ObjectStore | None = None,
    ) -> None:
        super().__init__(bus, subjects, policy=policy, objects=objects)
        self._sampler = sampler
        self._seconds = seconds

    async def load(self, published: PolicyPublished, fetch: Fetch) -> bool:
        """See `WeightsReceiver`."""
        tensors = await self.take(published)
        if tensors is None:
            return False
        await self._sampler.load_tensors(published, tensors)
        return True

    async def take(self, published: PolicyPublished) -> dict[str, torch.Tensor] | None:
        """The tensors of a version of the log, checked as those of its file are, or None: the file is to be read. Waits while
        they arrive. They are given once."""
        version = await self._take_result(published)
        if version is None:
            return None
        try:
            tensors = version.take_tensors("what the learner sent", (await self._complete(published)).manifest)
        except (WeightsRejected, OSError, ObjectMissing, BusError, ValueError) as error:
            log.warning("transferred weights rejected; reading the file", version=published.version, reason=str(error))
            return None
        log.info("weights taken from the learner", version=published.version)
        return tensors

    async def _receive(self, offered: WeightsOffered, given_up: threading.Event) -> ReceivedVersion:
        ends = time.monotonic() + self._seconds

        def receive() -> ReceivedVersion:
            with closing(join(offered.address, offered.port, offered.token)) as group:
                return receive_version(group, limit_bytes=self._sampler.max_version_bytes, ends=ends, is_over=given_up.is_set)

        return await anyio.to_thread.run_sync(receive, abandon_on_cancel=True, limiter=anyio.CapacityLimiter(1))
