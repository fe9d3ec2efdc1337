"""Waiting for the version that a turn is pinned to, as held-out episodes are, and opponents of a league."""

from contextlib import AbstractAsyncContextManager
from typing import Protocol, runtime_checkable

import anyio

from fleetbus.bus.base import LogBus
from fleetbus.log.newest_version import find_newest_version
from fleetbus_workers.inference.base import Sampler
from fleetbus_workers.inference.history_cache import LONGEST_LAG_SECONDS
from fleetbus_workers.inference.turn_rules import VersionSuperseded

POLL_SECONDS = 0.05
UNPUBLISHED_SECONDS = LONGEST_LAG_SECONDS
"""How long a pinned version is waited for before the log is asked whether there is one: a replica may be behind."""


@runtime_checkable
class HoldsVersions(Protocol):
    """A sampler that answers each turn from the version that it asks for."""

    def hold(self, version: int | None) -> AbstractAsyncContextManager[None]:
        """While it is open, `Sampler.generate` answers from this version. Raises `VersionSuperseded`."""


async def wait_for_version(bus: LogBus, subject: str, sampler: Sampler, pinned: int) -> None:
    """Wait until the version is loaded. Raises `VersionSuperseded` when a later one is, or the log still has none of that
    number or above on ``subject``, the policy's, after a while: whoever pins one has read it there."""
    waited = 0.0
    while sampler.version != pinned:
        if sampler.version > pinned:
            raise VersionSuperseded(f"version {pinned} is pinned, and {sampler.version} is loaded")
        await anyio.sleep(POLL_SECONDS)
        before, waited = waited, waited + POLL_SECONDS
        if before < UNPUBLISHED_SECONDS <= waited:
            newest = await find_newest_version(bus, subject)
            if newest is None or newest[1].version < pinned:
                raise VersionSuperseded(f"version {pinned} is pinned, and was never published")
