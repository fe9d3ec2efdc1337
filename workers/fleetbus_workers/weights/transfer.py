"""The interface of what brings a version from the learner to engines beside its file, which stays the truth and the way back.

A backend is two classes, one for each side. Publication and inference worker know these protocols alone
(docs/decisions/0228-weights-also-go-by-collective.md); `fleetbus_workers.weights.transfer_choice` picks the backend.
"""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from fleetbus_schemas import PolicyPublished, WeightsOffered
from fleetbus_workers.weights.file import WritingWatcher

if TYPE_CHECKING:
    import torch

ENGINE_COUNTER = "versions_transferred"
"""The counter in heartbeats of engines that take transfers: versions that they loaded so."""

PROCESSES_COUNTER = "transfer_processes"
"""In the same heartbeats: how many processes of the engine join each transfer, if more than one."""

Fetch = Callable[[PolicyPublished], Awaitable[PolicyPublished]]
"""A version as published to the same version in a local file; raises `fleetbus_workers.weights.file.WeightsRejected`."""


class TransferFailed(Exception):
    """The transfer of one version ended before it was whole; its file is read instead."""


class WeightsSender(Protocol):
    """The learner's side."""

    def run(self) -> AbstractAsyncContextManager[None]:
        """The sender's lifetime, around all offers. Raises `UserError`."""

    async def offer(self, version: int, lineage: str) -> WritingWatcher | None:
        """Offer a version that is about to be written; the watcher has to be told of the writing. Never waits long and never
        fails for what engines do."""


class WeightsReceiver(Protocol):
    """An engine's side."""

    @property
    def processes(self) -> int:
        """The number of them that join each transfer."""

    async def run(self) -> None:
        """Receive what is offered, until cancelled."""

    async def load(self, published: PolicyPublished, fetch: Fetch) -> bool:
        """Have the engine sample from a version that the log names, if what came is equal to its manifest. False: its file is
        to be read, and nothing has changed. Ends in bounded time. ``fetch`` is for an engine that has to load it once more.
        Raises `WeightsRejected` as `Sampler.load`."""


@runtime_checkable
class TellsOfWriting(Protocol):
    """A trainer that lets somebody follow the file that it writes."""

    watcher: WritingWatcher | None
    """Told of the next call of `save_weights`."""


@runtime_checkable
class TakesTensors(Protocol):
    """A sampler that takes a version from the memory of this process, too."""

    @property
    def max_version_bytes(self) -> int:
        """No version of its model is larger."""

    async def load_tensors(self, policy: PolicyPublished, tensors: Mapping[str, torch.Tensor]) -> None:
        """As `Sampler.load`, with tensors that were compared with the manifest. Raises `WeightsRejected`."""


@runtime_checkable
class ReceivesVersions(Protocol):
    """A sampler whose engine has processes of its own, each of which joins a transfer and receives the whole version."""

    @property
    def max_version_bytes(self) -> int:
        """No version of its model is larger."""

    @property
    def receiving_processes(self) -> int:
        """Their number."""

    async def receive_version(self, offered: WeightsOffered, seconds: float, given_up: threading.Event) -> None:
        """Have them receive what is offered; returns when all of them have it. Ends soon after ``given_up`` is set or
        ``seconds`` are over. They keep the newest that is whole. Raises `TransferFailed`."""

    async def load_received(self, token: str, policy: PolicyPublished, fetch: Fetch) -> bool:
        """As `Sampler.load`, with what was received under ``token``; as `WeightsReceiver.load`."""
