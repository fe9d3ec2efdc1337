"""The interface of what brings a version from the learner to engines beside its file, which stays the truth and the way back.

A backend is two classes, one for each side. Publication and inference worker know these protocols alone
(docs/decisions/0228-weights-also-go-by-collective.md); `fleetbus_workers.weights.transfer_choice` picks the backend.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from fleetbus_schemas import PolicyPublished
from fleetbus_workers.weights.file import WritingWatcher

if TYPE_CHECKING:
    import torch

ENGINE_COUNTER = "versions_transferred"
"""The counter in heartbeats of engines that take transfers: versions that they loaded so."""


class WeightsSender(Protocol):
    """The learner's side."""

    def run(self) -> AbstractAsyncContextManager[None]:
        """The sender's lifetime, around all offers. Raises `UserError`."""

    async def offer(self, version: int, lineage: str) -> WritingWatcher | None:
        """Offer a version that is about to be written; the watcher has to be told of the writing. Never waits long and never
        fails for what engines do."""


class WeightsReceiver(Protocol):
    """An engine's side."""

    async def run(self) -> None:
        """Receive what is offered, until cancelled."""

    async def take(self, published: PolicyPublished) -> dict[str, torch.Tensor] | None:
        """The tensors of a version that the log names, equal to its manifest; None: its file is to be read. Ends in bounded
        time."""


@runtime_checkable
class TellsOfWriting(Protocol):
    """A trainer that lets somebody follow the file that it writes."""

    watcher: WritingWatcher | None
    """Told of the next call of `save_weights`."""


@runtime_checkable
class TakesTensors(Protocol):
    """A sampler that takes a version from memory, too."""

    @property
    def max_version_bytes(self) -> int:
        """No version of its model is larger."""

    async def load_tensors(self, policy: PolicyPublished, tensors: Mapping[str, torch.Tensor]) -> None:
        """As `Sampler.load`, with tensors that were compared with the manifest. Raises `WeightsRejected`."""
