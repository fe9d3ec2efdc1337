"""Samplers around the sampler under test: what they do not answer themselves, it does."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager

import anyio

from fleetbus_schemas import PolicyPublished
from fleetbus_workers.inference.base import Generation, GenerationRequest, Sampler, WeightsRejected


class WrappedSampler:
    """`Sampler` that leaves everything to ``sampler``."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler

    @property
    def version(self) -> int:
        return self._sampler.version

    @version.setter
    def version(self, value: int) -> None:
        self._sampler.version = value

    def running(self) -> AbstractAsyncContextManager[None]:
        return self._sampler.running()

    async def generate(self, request: GenerationRequest) -> Generation:
        return await self._sampler.generate(request)

    async def load(self, policy: PolicyPublished) -> None:
        await self._sampler.load(policy)

    def forget(self, cache_key: str) -> None:
        self._sampler.forget(cache_key)


class WatchedSampler(WrappedSampler):
    """Says when a version was loaded or rejected; ``rejected`` is the reason of the last that was."""

    def __init__(self, sampler: Sampler) -> None:
        super().__init__(sampler)
        self.rejected = ""
        self._settled = anyio.Event()

    async def load(self, policy: PolicyPublished) -> None:
        try:
            await super().load(policy)
        except WeightsRejected as rejected:
            self.rejected = str(rejected)
            raise
        finally:
            self._settled.set()

    async def settled(self) -> None:
        """Until the next `load` has ended."""
        await self._settled.wait()
        self._settled = anyio.Event()
