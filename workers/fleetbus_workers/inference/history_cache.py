"""Token histories of episodes that this worker answers, kept by their hash; rebuilt from the log when unknown or different.

Delivery rule 4: a kept history is used only if its hash is the Observation's; otherwise the log decides, twice at most. A read
of the log may lag behind what the Observation stands on (its claim, its Actions): such an answer decides nothing.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence

import anyio
import msgspec
import structlog

from fleetbus.bus.base import LogBus
from fleetbus.core.episode.history import Turn, collect_images, shift_images
from fleetbus.core.episode.segments import (
    Segment,
    SegmentError,
    collect_segment_ids,
    fold_segments,
    hash_segment,
    place_in_segment,
)
from fleetbus.log.episodes import read_answered_observations, read_episode_state, read_turns
from fleetbus_schemas import NEW_ROOT, ChatMessage, Observation, SegmentOrigin, ShownImage, Subjects, ToolSpec
from fleetbus_schemas.tokens import EMPTY_HISTORY, pack_ids, start_history, unpack_ids
from fleetbus_workers.inference.base import name_history

REBUILD_TRIES = 2
REBUILD_PAUSE_SECONDS = 0.2
LONGEST_LAG_SECONDS = 30.0
"""An entry that is not read by then is not in the log any more."""

ENTRY_BYTES = 512
"""What a packed segment takes beside its contents."""

_encode = msgspec.json.Encoder().encode

log = structlog.get_logger()


class HistoryMismatch(Exception):
    """The log does not contain the history that the Observation stands on."""


class StaleObservation(Exception):
    """The log holds a newer claim or a result: this answer is no longer needed."""


class History(msgspec.Struct, frozen=True, kw_only=True):
    """All token ids of a segment so far, and the images that they show. The caller may extend ``ids``: it is no longer
    kept. ``tools`` are those that the prompt came with, ``calls`` how many calls of them were sampled; ``messages``
    are the whole conversation, where its prompts are rendered anew."""

    digest: bytes
    ids: list[int]
    images: tuple[ShownImage, ...] = ()
    tools: tuple[ToolSpec, ...] = ()
    calls: int = 0
    messages: tuple[ChatMessage, ...] = ()

    def leave(self, origin: SegmentOrigin) -> tuple[History, History]:
        """Cut what a segment that leaves this one keeps, and what its first prompt delta repeats, with images counted from the
        beginning of that. Raises `HistoryMismatch` if this segment does not have it."""
        length = len(self.ids)
        if min(origin.kept, origin.repeated) < 0 or origin.kept + origin.repeated > length:
            raise HistoryMismatch(f"a segment keeps {origin.kept} and repeats {origin.repeated} of {length} tokens")
        first_repeated = length - origin.repeated
        if any(image.start < cut < image.stop for image in self.images for cut in (origin.kept, first_repeated)):
            raise HistoryMismatch("a segment leaves its parent within an image")
        images = tuple(image for image in self.images if image.stop <= origin.kept)
        digest = start_history(pack_ids(self.ids[: origin.kept]), [image.object for image in images])
        repeated = shift_images([image for image in self.images if image.start >= first_repeated], -first_repeated)
        return (
            History(digest=digest, ids=self.ids[: origin.kept], images=images, tools=self.tools, calls=self.calls),
            History(digest=b"", ids=self.ids[first_repeated:], images=tuple(repeated)),
        )


class HistoryCache:
    """At most ``limit`` segments with ``limit_ids`` token ids as they are used (36 bytes for each id, and about six times the
    length of their tools as text), and beyond them ``limit_packed_bytes`` of packed ones (4 bytes for each id).

    The least recently used are packed, then dropped, for the log has them all; but where every session finds its history
    dropped, each step reads a whole episode. Each segment is kept under its `fleetbus_workers.inference.base.name_history`.
    """

    def __init__(
        self,
        bus: LogBus,
        subjects: Subjects,
        *,
        limit: int = 4096,
        limit_ids: int = 8 << 20,
        limit_packed_bytes: int = 256 << 20,
        with_messages: bool = False,
    ) -> None:
        self._bus = bus
        self._with_messages = with_messages
        self._subjects = subjects
        self._limit = limit
        self._limit_ids = limit_ids
        self._limit_packed_bytes = limit_packed_bytes
        self._entries: OrderedDict[str, History] = OrderedDict()
        self._packed: OrderedDict[str, tuple[bytes, bytes]] = OrderedDict()
        """Packed token ids, and everything else as JSON: tools and messages may be longer than the ids."""
        self._entry_id_count = 0
        self._packed_bytes = 0
        self.rebuilt = 0

    async def take_or_rebuild(self, observation: Observation) -> History:
        """The history that the observation stands on, given away; raises `HistoryMismatch` or `StaleObservation`.

        Of an observation that begins a segment it is the whole of the parent's. Waits for reads that lag,
        `LONGEST_LAG_SECONDS` at most.
        """
        entry = self.forget(name_history(observation.episode_id, _find_segment(observation)))
        if observation.history_hash == EMPTY_HISTORY:
            return History(digest=EMPTY_HISTORY, ids=[], tools=observation.tools)
        if entry is None or entry.digest != observation.history_hash:
            entry = await self._rebuild(observation)
        if observation.origin is not None and observation.origin.reason == "sub_agent":  # it will be gone on with
            self.put(name_history(observation.episode_id, observation.origin.parent), entry)
        return entry

    async def _rebuild(self, observation: Observation) -> History:
        episode = observation.episode_id
        give_up_at = anyio.current_time() + LONGEST_LAG_SECONDS
        tries, number = 0, _find_segment(observation)
        while True:
            turns = await self._turns_before(observation)
            segments = _fold_segments(turns or ())
            segment = segments[number] if 0 <= number < len(segments) else None
            if turns and segment is not None and hash_segment(segment, segments, turns) == observation.history_hash:
                self.rebuilt += 1
                first = turns[_find_root(segments, number).turns[0]]
                wanted = turns if self._with_messages else [first]
                asked = await read_answered_observations(self._bus, self._subjects, (observation.policy,), episode, wanted)
                return History(
                    digest=observation.history_hash,
                    ids=collect_segment_ids(segment, turns),
                    images=tuple(place_in_segment(segment, collect_images(turns))),
                    tools=asked[first.action.turn].tools if first.action.turn in asked else (),
                    messages=_collect_messages(turns, asked, observation.seat) if self._with_messages else (),
                    calls=_count_calls(segments, number, turns),
                )
            tries += turns is not None
            if tries >= REBUILD_TRIES or anyio.current_time() >= give_up_at:
                break
            await anyio.sleep(REBUILD_PAUSE_SECONDS)
        raise HistoryMismatch(f"turn {observation.turn} of {episode} refers to a history that is not in the log")

    async def _turns_before(self, observation: Observation) -> tuple[Turn, ...] | None:
        """The turns before the observation's in the log; None if what was read ends before what the observation stands on,
        which is none of the turns that it was asked for ahead of.

        Raises `StaleObservation` upon a newer claim or a result only: they stay true, even if a later read shows less.
        """
        episode = observation.episode_id
        episode_state = await read_episode_state(self._bus, self._subjects, episode)
        attempt = episode_state.newest.attempt if episode_state.newest is not None else 0
        if episode_state.result is not None or attempt > observation.attempt:
            raise StaleObservation(f"attempt {observation.attempt} of {episode} has ended")
        if attempt < observation.attempt:
            return None
        turns = await read_turns(self._bus, self._subjects, episode, episode_state)
        return turns[: observation.turn] if len(turns) >= observation.turn - observation.ahead else None

    def put(self, name: str, history: History) -> None:
        """Remember the history after an Action, most recently used last."""
        self.forget(name)
        self._entries[name] = history
        self._entry_id_count += len(history.ids)
        while len(self._entries) > self._limit or (self._entry_id_count > self._limit_ids and len(self._entries) > 1):
            self._pack_oldest()

    def forget(self, name: str) -> History | None:
        """Drop what is kept of a segment, and return it."""
        if (history := self._entries.pop(name, None)) is not None:
            self._entry_id_count -= len(history.ids)
            return history
        if (packed := self._packed.pop(name, None)) is None:
            return None
        self._packed_bytes -= _measure(packed)
        ids, rest = packed
        return msgspec.structs.replace(msgspec.json.decode(rest, type=History), ids=unpack_ids(ids))

    def _pack_oldest(self) -> None:
        name, history = self._entries.popitem(last=False)
        self._entry_id_count -= len(history.ids)
        packed = self._packed[name] = pack_ids(history.ids), _encode(msgspec.structs.replace(history, ids=[]))
        self._packed_bytes += _measure(packed)
        while self._packed_bytes > self._limit_packed_bytes:
            self._packed_bytes -= _measure(self._packed.popitem(last=False)[1])


def _measure(packed: tuple[bytes, bytes]) -> int:
    """Bytes of memory that a packed segment takes."""
    return len(packed[0]) + len(packed[1]) + ENTRY_BYTES


def _collect_messages(turns: Sequence[Turn], asked: Mapping[int, Observation], seat: str) -> tuple[ChatMessage, ...]:
    """The conversation of the seat's turns among these; raises `HistoryMismatch` if a turn's messages are not in the log."""
    messages: list[ChatMessage] = []
    for turn in turns:
        shown = asked.get(turn.action.turn)
        if shown is None and not seat:  # another policy may have been asked for another seat's
            raise HistoryMismatch(f"what turn {turn.action.turn} answered is not in the log")
        if shown is not None and shown.seat == seat:
            messages += [*shown.messages, ChatMessage(role="assistant", content=turn.action.text)]
    return tuple(messages)


def _find_segment(observation: Observation) -> int:
    """The segment that the observation stands on: the one that it extends, or leaves."""
    return observation.segment if observation.origin is None else observation.origin.parent


def _fold_segments(turns: tuple[Turn, ...]) -> tuple[Segment, ...]:
    try:
        return fold_segments(turns)
    except SegmentError as error:
        raise HistoryMismatch(str(error)) from error


def _find_root(segments: tuple[Segment, ...], number: int) -> Segment:
    """The segment whose prompt this one begins with."""
    segment = segments[number]
    while segment.origin is not None and segment.origin.parent != NEW_ROOT:
        segment = segments[segment.origin.parent]
    return segment


def _count_calls(segments: tuple[Segment, ...], number: int, turns: tuple[Turn, ...]) -> int:
    """The calls of a segment's turns, and of those that its parents had when it left them."""
    segment, before, calls = segments[number], len(turns), 0
    while True:
        calls += sum(len(turns[turn].action.tool_calls) for turn in segment.turns if turn < before)
        if segment.origin is None or segment.origin.parent == NEW_ROOT:
            return calls
        segment, before = segments[segment.origin.parent], segment.turns[0]
