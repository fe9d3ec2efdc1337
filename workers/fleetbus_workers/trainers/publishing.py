"""Weights of a loop of your own as versions of the run's policy, which its inference workers sample from.

    publisher = await open_publisher(bus, configuration)
    version = await publisher.publish([*model.named_parameters()], step=10)

For a trainer that takes groups from `fleetbus.client.rollouts`. ``bus`` is connected as ``learner``: no other role may publish.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import anyio

from fleetbus.bus.base import Bus
from fleetbus.concurrency.runtime import Runtime
from fleetbus.config.run_folder import policy_folder
from fleetbus.config.settings import Configuration
from fleetbus.core.training.lineage import lineage_number
from fleetbus_schemas import LineageStarted, Subjects
from fleetbus_workers.learner.publication import Publication
from fleetbus_workers.learner.resume import read_book, read_published_versions
from fleetbus_workers.trainers.weights import SentWeights
from fleetbus_workers.weights.store import get_object_store, open_store

if TYPE_CHECKING:
    import torch


class WeightsPublisher:
    """Versions of one lineage, one after another. Raises `LearnerReplaced` once another publisher or learner has begun one."""

    def __init__(self, publication: Publication, weights: SentWeights, runtime: Runtime) -> None:
        self._publication = publication
        self._weights = weights
        self._runtime = runtime
        self._turn = anyio.Lock()

    @property
    def version(self) -> int:
        """The newest version; -1 if there is none."""
        return self._publication.version

    async def publish(self, tensors: Iterable[tuple[str, torch.Tensor]], *, step: int) -> int:
        """Write, upload and announce tensors under the names of the model's files, and return the version. Calls that overlap
        follow each other; tensors must not change before theirs is over. With an iterator the first version holds copies of all
        of them in this machine's memory, for it may make them one after another. Raises `OSError`, and `ValueError` if names or
        shapes are not those of the version before."""
        async with self._turn:
            await self._runtime.offload(self._weights.write, tensors)
            return await self._publication.publish(step)


async def open_publisher(bus: Bus, configuration: Configuration, *, worker: str = "publisher") -> WeightsPublisher:
    """Begin a lineage of the run's policy: whoever published before is refused from now on."""
    run, subjects, runtime = configuration.run, Subjects(configuration.run.name), Runtime()
    book, versions = await read_book(bus, subjects, run.policy), await read_published_versions(bus, subjects, run.policy)
    numbers = [book.newest_lineage, *(lineage_number(made.lineage) for made in versions.values())]
    lineage = f"l{max(numbers) + 1}"
    weights = SentWeights(policy_folder(run).weights.absolute())
    publication = Publication(
        bus,
        subjects,
        weights,
        policy=run.policy,
        lineage=lineage,
        folder=policy_folder(run).weights.absolute(),
        keep=configuration.learner.keep_weights,
        runtime=runtime,
        store=open_store(bus, configuration.weights.store, run=run.name, public_url=configuration.weights.public_url),
        objects=get_object_store(bus, run.name),
        full_every=configuration.weights.full_every,
    )
    await publication.fence(LineageStarted(lineage=lineage, worker=worker, nonce=runtime.nonce()))
    return WeightsPublisher(publication, weights, runtime)
