"""In which context each turn of an episode was sampled, for people: its segment, and what was left out of it. Pure."""

from collections.abc import Iterable

import msgspec

from fleetbus.core.episode.segments import SegmentError, SegmentTree
from fleetbus_schemas import NEW_ROOT, Action, SegmentOrigin


class TurnContext(msgspec.Struct, frozen=True, kw_only=True):
    """The ``segment`` of a turn and its ``tokens`` after it. ``origin`` is None unless it begins with this turn; then
    ``dropped_turns`` answers and ``dropped_tokens`` of its parent are left out. A new root leaves out nothing: it is another
    conversation."""

    segment: int = 0
    tokens: int = 0
    origin: SegmentOrigin | None = None
    dropped_turns: int = 0
    dropped_tokens: int = 0

    @property
    def begins(self) -> str:
        """The beginning of the segment, in words; empty in a turn that begins none."""
        origin = self.origin
        if origin is None:
            return ""
        reason = origin.reason.replace("_", " ")
        if origin.parent == NEW_ROOT:
            return f"segment {self.segment} begins ({reason}) with a new prompt"
        kept = f"keeps {origin.kept} tokens of segment {origin.parent} and repeats {origin.repeated}"
        left_out = f"{self.dropped_turns} turn{'' if self.dropped_turns == 1 else 's'}, {self.dropped_tokens} tokens left out"
        return f"segment {self.segment} begins ({reason}): {kept}; {left_out}"


def describe_turns(actions: Iterable[Action]) -> list[TurnContext]:
    """One per Action of a history, as far as they are a tree."""
    tree, found = SegmentTree(), list[TurnContext]()
    for action in actions:
        origin, dropped_turns, dropped_tokens = action.origin, 0, 0
        try:
            begun = tree.begin(origin) if origin is not None else None
            segment = tree.append(action)
        except SegmentError:
            break
        if begun is not None and origin is not None and origin.parent != NEW_ROOT:
            parent = tree.segments[origin.parent]
            dropped_turns = len(parent.answers) - len(begun.answers)
            dropped_tokens = parent.length - origin.kept - origin.repeated
        found.append(
            TurnContext(
                segment=segment.number,
                tokens=segment.length,
                origin=origin,
                dropped_turns=dropped_turns,
                dropped_tokens=dropped_tokens,
            )
        )
    return found
