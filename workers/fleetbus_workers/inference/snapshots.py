"""An engine that answers each turn from the version that it is pinned to: the opponents of a league, one loaded at a time.

Turns of the loaded version run side by side. The first that asks for another one waits until they have ended, and no later
turn goes before it; when its version is loaded, all that wait for that one run. So no version starves, and memory is that of
one (docs/decisions/0255-a-league-of-versions.md).
"""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import anyio
import structlog

from fleetbus.bus.base import LogBus
from fleetbus.errors import RequestUnanswered
from fleetbus.log.episodes import decode_entries
from fleetbus_schemas import EngineLoad, LineageStarted, PolicyPublished
from fleetbus_workers.inference.base import Generation, GenerationRequest, Sampler, WeightsRejected
from fleetbus_workers.inference.turn_rules import VersionSuperseded

TRIES = 3
RETRY_SECONDS = 2.0
"""Between the tries of one turn to have its version: a replica of the log, or a store of weights, may be behind."""

log = structlog.get_logger()


class SnapshotSampler:
    """`Sampler` over ``sampler``, which loads what ``find`` returns for a version; that raises `WeightsRejected`."""

    def __init__(self, sampler: Sampler, find: Callable[[int], Awaitable[PolicyPublished]]) -> None:
        self._sampler = sampler
        self._find = find
        self._loaded: int | None = None
        self._is_loading = False
        self._running = 0
        self._waiting: dict[int, int] = {}
        """The versions that turns wait for, by the turns' numbers, in order."""
        self._last_number = self._last_admitted = 0
        self._changed = anyio.Event()

    @property
    def version(self) -> int:
        return self._sampler.version

    @version.setter
    def version(self, value: int) -> None:
        self._sampler.version = value

    @property
    def stats(self) -> dict[str, float]:
        """See `SamplerStats`."""
        return dict(getattr(self._sampler, "stats", {}))

    @property
    def engine_load(self) -> EngineLoad:
        """See `LoadedSampler`."""
        load: EngineLoad = getattr(self._sampler, "engine_load", EngineLoad())
        return load

    def run(self) -> AbstractAsyncContextManager[None]:
        return self._sampler.run()

    async def generate(self, request: GenerationRequest) -> Generation:
        return await self._sampler.generate(request)

    async def load(self, policy: PolicyPublished) -> None:
        await self._sampler.load(policy)

    def forget(self, cache_key: str) -> None:
        self._sampler.forget(cache_key)

    @asynccontextmanager
    async def hold(self, version: int | None) -> AsyncIterator[None]:
        """See `HoldsVersions`. A version that cannot be had is tried again, and then gone."""
        if version is None:
            raise VersionSuperseded("this worker serves the versions of a league, and the turn asks for none")
        for remaining in reversed(range(TRIES)):
            try:
                await self._enter(version)
                break
            except WeightsRejected as rejected:
                log.warning("version of the league cannot be loaded", version=version, reason=str(rejected))
                if not remaining:
                    raise VersionSuperseded(f"version {version} cannot be loaded any more: {rejected}") from rejected
            await anyio.sleep(RETRY_SECONDS)
        try:
            yield
        finally:
            self._running -= 1
            self._wake()

    async def _enter(self, version: int) -> None:
        """Wait for the turn to run; it counts as running then."""
        self._last_number += 1
        number = self._last_number
        self._waiting[number] = version
        try:
            while not self._may_run(number):
                if self._may_load(number):
                    await self._load(version)
                else:
                    await self._changed.wait()
            self._running += 1
        finally:
            del self._waiting[number]
            self._wake()

    def _may_run(self, number: int) -> bool:
        """True for a turn of the loaded version that was there when that was loaded, or before which no other one waits."""
        if self._is_loading or self._waiting[number] != self._loaded:
            return False
        return number <= self._last_admitted or all(each == self._loaded for each in self._waiting.values())

    def _may_load(self, number: int) -> bool:
        """True for the first that waits, once none runs and none of those that wait may run."""
        if self._running or self._is_loading or any(map(self._may_run, self._waiting)):
            return False
        return number == next(iter(self._waiting))

    async def _load(self, version: int) -> None:
        self._is_loading = True
        try:
            if version != self._loaded:
                published = await self._find(version)
                self._loaded = None  # a load that fails may have begun to swap
                with anyio.CancelScope(shield=True):  # an engine that was told to swap does so
                    await self._sampler.load(published)
            self._loaded, self._last_admitted = version, self._last_number
        finally:
            self._is_loading = False
            self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()


class PublishedVersions:
    """The versions on a policy's subject by number, as local files that ``fetch`` makes of them."""

    def __init__(
        self, bus: LogBus, subject: str, fetch: Callable[[PolicyPublished], Awaitable[PolicyPublished]] | None = None
    ) -> None:
        self._bus = bus
        self._subject = subject
        self._fetch = fetch
        self._known: dict[int, PolicyPublished] = {}
        self._next = 1

    async def find(self, version: int) -> PolicyPublished:
        """Raises `WeightsRejected` if the log does not have the version, or does not answer, or its file is gone."""
        try:
            if version not in self._known:
                await self._read_on()
        except RequestUnanswered as unanswered:
            raise WeightsRejected(f"the log does not answer: {unanswered}") from unanswered
        if version not in self._known:
            raise WeightsRejected(f"the log has no version {version} on {self._subject}")
        published = self._known[version]
        return await self._fetch(published) if self._fetch is not None else published

    async def _read_on(self) -> None:
        async for entry in self._bus.scan([self._subject], start=self._next):
            self._next = entry.sequence + 1
            for _, published in decode_entries(PolicyPublished, [entry], beside=(LineageStarted,)):
                self._known[published.version] = published
