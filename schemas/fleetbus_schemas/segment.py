"""Segments: an episode is a tree of token sequences. Parts of messages, never published alone."""

from __future__ import annotations

from typing import Literal

import msgspec

from fleetbus_schemas.chat import ToolSpec

SegmentReason = Literal[
    "context_dropped",
    "summarised",
    "sub_agent",
    "reasoning_dropped",
    "tools_changed",
    "system_changed",
    "history_edited",
    "seat",
]
"""Why a segment begins that is not the episode's first."""

NEW_ROOT = -1
"""``parent`` of a segment that keeps nothing of another: it begins with a whole prompt."""


class SegmentOrigin(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """A cut of ``parent``: the segment begins with the first ``kept`` tokens of the parent's sequence as it stands at
    that turn. Its first prompt delta then repeats the parent's last ``repeated`` tokens, by their ids, before the new messages.

    A new root has the parent `NEW_ROOT` and keeps nothing.
    """

    parent: int
    kept: int
    reason: SegmentReason
    repeated: int = 0


class EpisodeSegment(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """One segment of a finished episode, in the order of `EpisodeFinished.segments`. ``origin`` is None for the first.

    ``first_turn`` is the turn that it begins with, ``turns`` how many were played in it, ``tokens`` its whole length, what it
    keeps of its parent included.
    """

    origin: SegmentOrigin | None
    first_turn: int
    turns: int
    tokens: int


class ContextChange(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Asks for the policy's next turn in another context than the one that has grown so far; a step's messages follow it.

    ``keep_turns`` N keeps the prompt that the present segment began with and its last N turns, each an answer and what was
    shown after it; what lies between is dropped. With 0 nothing is kept: the step's messages are a whole prompt, with
    ``tools``. ``resume`` continues an earlier segment where it stood. Kept turns are never rendered again.
    """

    reason: SegmentReason = "context_dropped"
    keep_turns: int = 0
    resume: int | None = None
    tools: tuple[ToolSpec, ...] = ()
