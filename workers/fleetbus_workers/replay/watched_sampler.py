"""A sampler around the sampler under test that says when a version was loaded or rejected."""

from collections.abc import Iterable

import anyio

from fleetbus_schemas import PolicyPublished
from fleetbus_workers.inference.base import Generation, GenerationRequest, Sampler, WeightsRejected
from fleetbus_workers.replay.token_histories import ExpectedTurn


class WatchedSampler:
    """`Sampler` that leaves everything to ``sampler``; ``rejected`` is why the last version was rejected, if it was."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler
        self.run = sampler.run
        self.forget = sampler.forget
        self.rejected = ""
        self._settled = anyio.Event()

    @property
    def version(self) -> int:
        return self._sampler.version

    @version.setter
    def version(self, value: int) -> None:
        self._sampler.version = value

    async def generate(self, request: GenerationRequest) -> Generation:
        return await self._sampler.generate(request)

    async def load(self, policy: PolicyPublished) -> None:
        self.rejected = ""
        try:
            await self.load_version(policy)
        except WeightsRejected as rejected:
            self.rejected = str(rejected)
            raise
        finally:
            self._settled.set()

    async def load_version(self, policy: PolicyPublished) -> None:
        await self._sampler.load(policy)

    async def wait_until_settled(self) -> None:
        """Return when the next `load` has ended."""
        await self._settled.wait()
        self._settled = anyio.Event()

    async def prepare(self, turns: Iterable[ExpectedTurn]) -> None:
        """Called with the turns that the loaded version is going to be asked for."""
