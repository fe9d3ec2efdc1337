"""A sampler around the sampler under test that says when a version was loaded or rejected."""

from collections.abc import Iterable

import anyio

from fleetbus_schemas import PolicyPublished
from fleetbus_workers.inference.base import Generation, GenerationRequest, Sampler, WeightsRejected
from fleetbus_workers.replay.token_histories import ExpectedTurn


class WatchedSampler:
    """`Sampler` that leaves everything to ``sampler``; ``rejected`` is why the expected version was rejected, if it was.
    A worker that cannot have a version tries those before it, too."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler
        self.run = sampler.run
        self.forget = sampler.forget
        self.rejected = ""
        self._expected = -1
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
        problem = ""
        try:
            await self.load_version(policy)
        except WeightsRejected as rejected:
            problem = str(rejected)
            raise
        finally:
            if policy.version == self._expected:
                self.rejected = problem
                self._settled.set()

    async def load_version(self, policy: PolicyPublished) -> None:
        await self._sampler.load(policy)

    def expect(self, version: int) -> None:
        """This version is going to be published."""
        self.rejected, self._expected, self._settled = "", version, anyio.Event()

    async def wait_until_settled(self) -> None:
        """Return when a `load` of the expected version has ended."""
        await self._settled.wait()

    async def prepare(self, turns: Iterable[ExpectedTurn]) -> None:
        """Called with the turns that the loaded version is going to be asked for."""
