"""Token histories of episodes that this worker answers, kept by their hash; rebuilt from the log when unknown or different.

Delivery rule 4: a kept history is used only if its hash is the Observation's; otherwise the log decides, twice at most.
"""

from __future__ import annotations

from collections import OrderedDict

import anyio
import msgspec
import structlog

from fleetbus.bus.base import Bus
from fleetbus.core.history import history_hash, history_ids, history_images
from fleetbus.episodes import read_standing, read_turns
from fleetbus_schemas import Observation, ShownImage, Subjects
from fleetbus_schemas.tokens import EMPTY_HISTORY

REBUILD_TRIES = 2
REBUILD_PAUSE_SECONDS = 0.2

log = structlog.get_logger()


class HistoryMismatch(Exception):
    """The log does not contain the history that the Observation stands on."""


class StaleObservation(Exception):
    """A newer claim or a result stands in the log: nobody waits for this answer any more."""


class History(msgspec.Struct, frozen=True, kw_only=True):
    """All token ids of an episode so far, and the images that they show. Whoever took it may extend ``ids``: it is no longer
    kept."""

    digest: bytes
    ids: list[int]
    images: tuple[ShownImage, ...] = ()


class Histories:
    """At most ``limit`` episodes and ``limit_ids`` token ids (36 bytes each), the least recently used dropped first: the log
    has them all."""

    def __init__(self, bus: Bus, subjects: Subjects, *, limit: int = 4096, limit_ids: int = 8 << 20) -> None:
        self._bus = bus
        self._subjects = subjects
        self._limit = limit
        self._limit_ids = limit_ids
        self._kept: OrderedDict[str, History] = OrderedDict()
        self._kept_ids = 0
        self.rebuilt = 0

    async def before(self, observation: Observation) -> History:
        """The history that the observation stands on, given away; raises `HistoryMismatch` or `StaleObservation`."""
        kept = self.forget(observation.episode_id)
        if observation.history_hash == EMPTY_HISTORY:
            return History(digest=EMPTY_HISTORY, ids=[])
        if kept is not None and kept.digest == observation.history_hash:
            return kept
        return await self._rebuild(observation)

    async def _rebuild(self, observation: Observation) -> History:
        episode = observation.episode_id
        for attempt in range(REBUILD_TRIES):
            if attempt:
                await anyio.sleep(REBUILD_PAUSE_SECONDS)
            standing = await read_standing(self._bus, self._subjects, episode)
            newest = standing.newest
            if standing.result is not None or newest is None or newest.attempt != observation.attempt:
                raise StaleObservation(f"attempt {observation.attempt} of {episode} is over")
            turns = (await read_turns(self._bus, self._subjects, episode, standing))[: observation.turn]
            if history_hash(turns) == observation.history_hash:
                self.rebuilt += 1
                images = tuple(history_images(turns))
                return History(digest=observation.history_hash, ids=history_ids(turns), images=images)
        raise HistoryMismatch(f"turn {observation.turn} of {episode} stands on a history that the log does not contain")

    def keep(self, episode_id: str, history: History) -> None:
        """Remember the history after an Action, most recently used last."""
        self.forget(episode_id)
        self._kept[episode_id] = history
        self._kept_ids += len(history.ids)
        while len(self._kept) > self._limit or (self._kept_ids > self._limit_ids and len(self._kept) > 1):
            self.forget(next(iter(self._kept)))

    def forget(self, episode_id: str) -> History | None:
        """Drop what is kept of an episode, and return it."""
        kept = self._kept.pop(episode_id, None)
        self._kept_ids -= len(kept.ids) if kept is not None else 0
        return kept
