"""Chooses the segment of an episode's next turn: where the context stands, what is dropped from it, and when. Pure.

Everything here follows from the recorded turns and messages and from settings, so that an attempt that takes over decides as
the one before it did.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from fleetbus.config.settings import EnvironmentSettings
from fleetbus.core.episode.history import Turn
from fleetbus.core.episode.segments import Segment, SegmentError, SegmentTree, describe_segments
from fleetbus_schemas import (
    NEW_ROOT,
    ChatMessage,
    ContextChange,
    EpisodeSegment,
    Observation,
    SegmentOrigin,
    SegmentReason,
    Text,
)
from fleetbus_workers.environment.episode.token_estimate import TokenEstimate


class Placement(msgspec.Struct, frozen=True, kw_only=True):
    """The segment of a turn, where it leaves its parent if it begins with this turn, and how many there are then."""

    segment: int = 0
    origin: SegmentOrigin | None = None
    segments: int = 1

    @classmethod
    def of(cls, observation: Observation) -> Placement:
        """The placement of a recorded turn."""
        return cls(segment=observation.segment, origin=observation.origin, segments=observation.segments)

    def foresee(self, wanted: ContextChange) -> Placement | None:
        """The placement of the turn after one that is placed so; None if that depends on what is answered before."""
        if wanted.resume is not None:
            is_known = 0 <= wanted.resume < self.segments
            return Placement(segment=wanted.resume, segments=self.segments) if is_known else None
        if wanted.keep_turns:
            return None
        origin = SegmentOrigin(parent=NEW_ROOT, kept=0, reason=wanted.reason)
        return Placement(segment=self.segments, origin=origin, segments=self.segments + 1)


FIRST = Placement()

UNUSED_ESTIMATE = TokenEstimate()


class EpisodeContext:
    """The segments of one attempt. ``max_tokens`` is what a segment may hold."""

    __slots__ = ("_current", "_estimate", "_settings", "_tree", "max_tokens")

    def __init__(self, settings: EnvironmentSettings, *, max_tokens: int) -> None:
        self._settings = settings
        self._tree = SegmentTree()
        self._current: Segment | None = None
        self._estimate = TokenEstimate() if settings.compaction != "off" else UNUSED_ESTIMATE
        self.max_tokens = max_tokens

    @property
    def tokens(self) -> int:
        """Tokens that all turns added so far, in all segments."""
        return self._tree.tokens

    @property
    def held(self) -> int:
        """Tokens that the segment of the last turn holds."""
        return self._current.length if self._current is not None else 0

    def count_held(self, placement: Placement) -> int:
        """Tokens that the segment of the next turn holds before it."""
        origin = placement.origin
        return self.held if origin is None else origin.kept + origin.repeated

    @property
    def segments(self) -> tuple[EpisodeSegment, ...]:
        """As a result carries them."""
        return describe_segments(self._tree.segments)

    def append(self, turn: Turn, messages: Sequence[ChatMessage]) -> None:
        """Add the turn that answered ``messages``. Raises `SegmentError` if it does not fit those before it."""
        action = turn.action
        self._current = self._tree.append(action)
        if self._settings.compaction != "off":
            self._estimate.learn(messages, action)

    def extend(self) -> Placement:
        """The next turn continues where the last one was played."""
        if self._current is None or len(self._tree.segments) == 1:
            return FIRST
        return Placement(segment=self._current.number, segments=len(self._tree.segments))

    def change(self, wanted: ContextChange) -> Placement:
        """The next turn as an environment asks for it. Raises `SegmentError` if there is no such segment."""
        if wanted.resume is not None:
            if not 0 <= wanted.resume < len(self._tree.segments):
                raise SegmentError(f"segment {wanted.resume} cannot be gone on with: {len(self._tree.segments)} were begun")
            self._current = self._tree.segments[wanted.resume]
            return self.extend()
        if wanted.keep_turns == 0:
            return self._begin(SegmentOrigin(parent=NEW_ROOT, kept=0, reason=wanted.reason))
        return self.drop_turns(wanted.keep_turns, wanted.reason) or self.extend()

    def drop_turns(self, keep_turns: int, reason: SegmentReason) -> Placement | None:
        """A segment of this one's prompt and its last turns; None if there is nothing to drop."""
        segment = self._current
        if segment is None or len(segment.answers) <= keep_turns:
            return None
        repeated = segment.length - segment.answers[-keep_turns]
        return self._begin(SegmentOrigin(parent=segment.number, kept=segment.answers[0], reason=reason, repeated=repeated))

    def needs_compaction(self, messages: Sequence[ChatMessage]) -> bool:
        """True if ``messages`` would fill more than the share of the context that the settings allow."""
        if self._settings.compaction == "off":
            return False
        return self.held + self._estimate.estimate(messages) > self._settings.compaction_share * self.max_tokens

    def compact(self, messages: Sequence[ChatMessage]) -> Placement | None:
        """Drop turns: as many as `EnvironmentSettings.compaction_turns` stay, or fewer if those would fill it again."""
        room = self._settings.compaction_share * self.max_tokens - self._estimate.estimate(messages)
        segment = self._current
        if segment is None:
            return None
        for turns in range(min(self._settings.compaction_turns, len(segment.answers) - 1), 0, -1):
            if turns == 1 or segment.answers[0] + segment.length - segment.answers[-turns] <= room:
                return self.drop_turns(turns, "context_dropped")
        return None

    def keep_summary(self) -> Placement:
        """A segment of this one's prompt and the turn that was just played, a summary."""
        return self.drop_turns(1, "summarised") or self.extend()

    def _begin(self, origin: SegmentOrigin) -> Placement:
        number = len(self._tree.segments)
        return Placement(segment=number, origin=origin, segments=number + 1)


def find_context_tokens(settings: EnvironmentSettings, max_tokens: int, context_tokens: int) -> int:
    """Most tokens of a segment: those of the episode, or less if its model takes less and turns may be dropped."""
    drops_turns = settings.compaction != "off" or settings.context_tools
    return min(max_tokens, context_tokens) if drops_turns and context_tokens else max_tokens


def append_line(messages: tuple[ChatMessage, ...], line: str) -> tuple[ChatMessage, ...]:
    """The messages with a line at the end of the last one."""
    if not messages:
        return (ChatMessage(role="user", content=line),)
    last = messages[-1]
    content = f"{last.content}\n{line}" if isinstance(last.content, str) else (*last.content, Text(text=line))
    return (*messages[:-1], msgspec.structs.replace(last, content=content))
