"""Token histories of episodes that this worker answers, kept by their hash; rebuilt from the log when unknown or different.

Delivery rule 4: a kept history is used only if its hash is the Observation's; otherwise the log decides, twice at most. A read
of the log may lag behind what the Observation stands on (its claim, its Actions): such an answer decides nothing.
"""

from __future__ import annotations

from collections import OrderedDict

import anyio
import msgspec
import structlog

from fleetbus.bus.base import Bus
from fleetbus.core.history import Turn, collect_images, collect_token_ids, history_hash
from fleetbus.episodes import read_answered_observations, read_episode_state, read_turns
from fleetbus_schemas import Observation, ShownImage, Subjects, ToolSpec
from fleetbus_schemas.tokens import EMPTY_HISTORY

REBUILD_TRIES = 2
REBUILD_PAUSE_SECONDS = 0.2
LONGEST_LAG_SECONDS = 30.0
"""An entry that is not read by then is not in the log any more."""

log = structlog.get_logger()


class HistoryMismatch(Exception):
    """The log does not contain the history that the Observation stands on."""


class StaleObservation(Exception):
    """The log holds a newer claim or a result: this answer is no longer needed."""


class History(msgspec.Struct, frozen=True, kw_only=True):
    """All token ids of an episode so far, and the images that they show. The caller may extend ``ids``: it is no longer
    kept. ``tools`` are those that the prompt came with, ``calls`` how many calls of them were sampled."""

    digest: bytes
    ids: list[int]
    images: tuple[ShownImage, ...] = ()
    tools: tuple[ToolSpec, ...] = ()
    calls: int = 0


class HistoryCache:
    """At most ``limit`` episodes and ``limit_ids`` token ids (36 bytes each), the least recently used dropped first: the log
    has them all."""

    def __init__(self, bus: Bus, subjects: Subjects, *, limit: int = 4096, limit_ids: int = 8 << 20) -> None:
        self._bus = bus
        self._subjects = subjects
        self._limit = limit
        self._limit_ids = limit_ids
        self._entries: OrderedDict[str, History] = OrderedDict()
        self._entry_id_count = 0
        self.rebuilt = 0

    async def take_or_rebuild(self, observation: Observation) -> History:
        """The history that the observation stands on, given away; raises `HistoryMismatch` or `StaleObservation`.

        Waits for reads that lag, `LONGEST_LAG_SECONDS` at most.
        """
        entry = self.forget(observation.episode_id)
        if observation.history_hash == EMPTY_HISTORY:
            return History(digest=EMPTY_HISTORY, ids=[], tools=observation.tools)
        if entry is not None and entry.digest == observation.history_hash:
            return entry
        return await self._rebuild(observation)

    async def _rebuild(self, observation: Observation) -> History:
        episode = observation.episode_id
        give_up_at = anyio.current_time() + LONGEST_LAG_SECONDS
        tries = 0
        while True:
            turns = await self._turns_before(observation)
            if turns is not None and history_hash(turns) == observation.history_hash:
                self.rebuilt += 1
                images = tuple(collect_images(turns))
                first = await read_answered_observations(self._bus, self._subjects, observation.policy, episode, turns[:1])
                return History(
                    digest=observation.history_hash,
                    ids=collect_token_ids(turns),
                    images=images,
                    tools=first[0].tools if first else (),
                    calls=sum(len(turn.action.tool_calls) for turn in turns),
                )
            tries += turns is not None
            if tries >= REBUILD_TRIES or anyio.current_time() >= give_up_at:
                break
            await anyio.sleep(REBUILD_PAUSE_SECONDS)
        raise HistoryMismatch(f"turn {observation.turn} of {episode} refers to a history that is not in the log")

    async def _turns_before(self, observation: Observation) -> tuple[Turn, ...] | None:
        """The turns before the observation's in the log; None if what was read ends before what the observation stands on.

        Raises `StaleObservation` upon a newer claim or a result only: they stay true, whatever a later read shows.
        """
        episode = observation.episode_id
        episode_state = await read_episode_state(self._bus, self._subjects, episode)
        attempt = episode_state.newest.attempt if episode_state.newest is not None else 0
        if episode_state.result is not None or attempt > observation.attempt:
            raise StaleObservation(f"attempt {observation.attempt} of {episode} has ended")
        if attempt < observation.attempt:
            return None
        turns = await read_turns(self._bus, self._subjects, episode, episode_state)
        return turns[: observation.turn] if len(turns) >= observation.turn else None

    def put(self, episode_id: str, history: History) -> None:
        """Remember the history after an Action, most recently used last."""
        self.forget(episode_id)
        self._entries[episode_id] = history
        self._entry_id_count += len(history.ids)
        while len(self._entries) > self._limit or (self._entry_id_count > self._limit_ids and len(self._entries) > 1):
            self.forget(next(iter(self._entries)))

    def forget(self, episode_id: str) -> History | None:
        """Drop what is kept of an episode, and return it."""
        entry = self._entries.pop(episode_id, None)
        self._entry_id_count -= len(entry.ids) if entry is not None else 0
        return entry
