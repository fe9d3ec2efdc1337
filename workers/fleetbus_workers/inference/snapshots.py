"""An engine that answers each turn from the version that it is pinned to: the opponents of a league, one loaded at a time.

Turns of the loaded version run side by side, also while another one is fetched for the first that asks for it. Once that is at
hand, no later turn goes before it; when it is loaded, all that wait for it run. So no version starves, a store that is slow
or away holds up no turn of the loaded one, and memory is that of one (docs/decisions/0255-a-league-of-versions.md).
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import anyio
import structlog

from fleetbus.bus.base import LogBus
from fleetbus.errors import RequestUnanswered
from fleetbus.log.episodes import decode_entries
from fleetbus_schemas import EngineLoad, LineageStarted, PolicyPublished
from fleetbus_workers.inference.base import Generation, GenerationRequest, Sampler, WeightsRejected
from fleetbus_workers.inference.turn_rules import VersionSuperseded

PAUSES_SECONDS = (2.0, 4.0, 8.0, 16.0, 32.0)
"""Between the tries to have a version, over a minute in all: a replica of the log may be behind, and a store away."""

ANSWER_SECONDS = 30.0

log = structlog.get_logger()


class SnapshotSampler:
    """`Sampler` over ``sampler``, which loads what ``find`` returns for a version; that raises `WeightsRejected`. Where the
    engine rejects it, ``discard_copies`` is called before ``find`` is again."""

    def __init__(
        self,
        sampler: Sampler,
        find: Callable[[int], Awaitable[PolicyPublished]],
        discard_copies: Callable[[], None] = lambda: None,
    ) -> None:
        self._sampler = sampler
        self._find = find
        self._discard_copies = discard_copies
        self._loaded: int | None = None
        self._next: PolicyPublished | None = None
        """The version that is at hand and loaded as soon as no turn runs."""
        self._is_busy = self._is_loading = False
        """Busy: one turn fetches a version for all that wait for it, or loads it."""
        self._running = 0
        self._waiting: dict[int, int] = {}
        """The versions that turns wait for, by the turns' numbers, in order."""
        self._rejected: dict[int, WeightsRejected] = {}
        """By number of a turn that waits the reason why its version cannot be had."""
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
        for pause_seconds in (*PAUSES_SECONDS, None):
            try:
                await self._enter(version)
                break
            except WeightsRejected as rejected:
                if pause_seconds is None:
                    raise VersionSuperseded(f"version {version} cannot be loaded any more: {rejected}") from rejected
            await anyio.sleep(pause_seconds)
        try:
            yield
        finally:
            self._running -= 1
            self._wake()

    async def _enter(self, version: int) -> None:
        """Wait for the turn to run; it counts as running then. Raises `WeightsRejected`."""
        self._last_number += 1
        number = self._last_number
        self._waiting[number] = version
        try:
            while not self._may_run(number):
                if number in self._rejected:
                    raise self._rejected[number]
                if self._may_load(number):
                    await self._load()
                elif self._may_fetch(number):
                    await self._fetch(version)
                else:
                    await self._changed.wait()
            self._running += 1
        finally:
            del self._waiting[number]
            self._rejected.pop(number, None)
            if self._next is not None and self._next.version not in self._waiting.values():
                self._next = None
            self._wake()

    def _may_run(self, number: int) -> bool:
        """True for a turn of the loaded version that was there when that was loaded, or while no other one is at hand."""
        if self._is_loading or self._waiting[number] != self._loaded:
            return False
        return number <= self._last_admitted or self._next is None

    def _may_load(self, number: int) -> bool:
        """True for a turn of the version that is at hand, once none runs and none of those that wait may run."""
        if self._running or self._is_busy or self._next is None or self._waiting[number] != self._next.version:
            return False
        return not any(map(self._may_run, self._waiting))

    def _may_fetch(self, number: int) -> bool:
        """True for the first that waits for a version that is not loaded, while none is at hand."""
        if self._is_busy or self._next is not None or number in self._rejected:
            return False
        return number == next((each for each, version in self._waiting.items() if version != self._loaded), None)

    async def _fetch(self, version: int) -> None:
        self._is_busy = True
        try:
            self._next = await self._find(version)
        except WeightsRejected as rejected:
            self._reject(version, rejected)
        finally:
            self._is_busy = False
            self._wake()

    async def _load(self) -> None:
        assert self._next is not None
        published, self._next = self._next, None
        self._is_busy = self._is_loading = True
        self._loaded = None  # a load that fails may have begun to swap
        try:
            with anyio.CancelScope(shield=True):  # an engine that was told to swap does so
                await self._sampler.load(published)
            self._loaded, self._last_admitted = published.version, self._last_number
        except WeightsRejected as rejected:
            self._discard_copies()
            self._reject(published.version, rejected)
        finally:
            self._is_busy = self._is_loading = False
            self._wake()

    def _reject(self, version: int, rejected: WeightsRejected) -> None:
        """All that wait for the version learn it at once: one after another they would try for hours."""
        log.warning("version of the league cannot be loaded", version=version, reason=str(rejected))
        self._rejected |= {number: rejected for number, waited in self._waiting.items() if waited == version}

    def _wake(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()


class PublishedVersions:
    """The versions by number of the policy that the first of ``subjects`` is of, as local files that ``fetch`` makes."""

    def __init__(
        self,
        bus: LogBus,
        subjects: Sequence[str],
        fetch: Callable[[PolicyPublished], Awaitable[PolicyPublished]] | None = None,
    ) -> None:
        self._bus = bus
        self._subjects = subjects
        self._policy = subjects[0].rpartition(".")[2]
        self._fetch = fetch
        self._positions: dict[int, tuple[str, int]] = {}
        """Subject and sequence of each: a month of manifests would not fit into memory."""
        self._next = 1

    async def find(self, version: int) -> PolicyPublished:
        """Raises `WeightsRejected` if the log does not have the version, or does not answer, or its file is gone."""
        if version not in self._positions:
            try:
                await self._read_on()
            except RequestUnanswered as unanswered:
                raise WeightsRejected(f"the log does not answer: {unanswered}") from unanswered
        try:
            with anyio.fail_after(ANSWER_SECONDS):
                published = await self._read(version)
                is_older = published is None and (await self._bus.log_state()).last_sequence < self._next - 1
        except (RequestUnanswered, TimeoutError) as unanswered:
            self._forget()
            raise WeightsRejected(f"the log does not answer: {unanswered}") from unanswered
        if published is None:
            if version in self._positions or is_older:
                self._forget()
            raise WeightsRejected(f"the log has no version {version} on {self._subjects[0]}")
        return await self._fetch(published) if self._fetch is not None else published

    def _forget(self) -> None:
        """A log that went back in time has other entries where they were."""
        self._positions.clear()
        self._next = 1

    async def _read_on(self) -> None:
        async for entry in self._bus.scan(self._subjects, start=self._next):
            self._next = entry.sequence + 1
            for _, published in decode_entries(PolicyPublished, [entry], beside=(LineageStarted,)):
                is_known = published.version in self._positions and entry.subject != self._subjects[0]
                if published.policy == self._policy and not is_known:
                    self._positions[published.version] = entry.subject, entry.sequence

    async def _read(self, version: int) -> PolicyPublished | None:
        """The version as it stands in the log; None if it does not, or does not any more."""
        if version not in self._positions:
            return None
        subject, sequence = self._positions[version]
        async with self._bus.read([subject], start=sequence) as reader:
            found = decode_entries(PolicyPublished, [await reader.receive()], beside=(LineageStarted,))
        is_it = [each for entry, each in found if entry.sequence == sequence and each.policy == self._policy]
        return next((published for published in is_it if published.version == version), None)
