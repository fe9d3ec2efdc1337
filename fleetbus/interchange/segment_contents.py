"""The contents of an episode's segments, turn by turn: prompts and answers that a token sequence holds, and its ids. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from fleetbus.core.episode.segments import SegmentTree
from fleetbus_schemas import NEW_ROOT, Action, SegmentOrigin
from fleetbus_schemas.tokens import TOKEN_BYTES


class Held(msgspec.Struct, frozen=True):
    """The prompt delta or the answer of a turn, which begins at the token ``start`` of a segment's sequence."""

    turn: int
    is_answer: bool
    start: int


class SegmentContent(msgspec.Struct, kw_only=True):
    """``copied`` is what a segment has of its parent, ``turns`` are its own; ``ids`` are the packed ids of all of it. ``after``
    is the last turn that was played before it began, -1 for none."""

    number: int
    origin: SegmentOrigin | None
    after: int
    copied: tuple[Held, ...] = ()
    turns: list[int] = msgspec.field(default_factory=list)
    held: list[Held] = msgspec.field(default_factory=list)
    ids: bytearray = msgspec.field(default_factory=bytearray)

    @property
    def length(self) -> int:
        """Its tokens so far."""
        return len(self.ids) // TOKEN_BYTES


def fold_contents(actions: Sequence[Action]) -> tuple[list[SegmentContent], list[bytes]]:
    """The segments by number, and of each Action the packed ids of its whole prompt. Raises `SegmentError` for turns that are
    no tree."""
    contents: dict[int, SegmentContent] = {}
    prompts: list[bytes] = []
    for content in iterate_prompts(actions):
        contents[content.number] = content
        prompts.append(bytes(content.ids))
    return list(contents.values()), prompts


def iterate_prompts(actions: Sequence[Action]) -> Iterator[SegmentContent]:
    """The segment of each Action when its prompt was whole and its answer was not there yet. Raises as `fold_contents`."""
    tree = SegmentTree()
    contents: list[SegmentContent] = []
    for turn, action in enumerate(actions):
        number = tree.append(action).number
        if number == len(contents):
            contents.append(_begin(number, action.origin, turn - 1, contents))
        content = contents[number]
        content.turns.append(turn)
        content.held.append(Held(turn, False, content.length))
        content.ids += action.prompt_delta
        yield content
        content.held.append(Held(turn, True, content.length))
        content.ids += action.sampled


def _begin(number: int, origin: SegmentOrigin | None, after: int, contents: Sequence[SegmentContent]) -> SegmentContent:
    content = SegmentContent(number=number, origin=origin, after=after)
    if origin is None or origin.parent == NEW_ROOT:
        return content
    parent = contents[origin.parent]
    first_repeated = parent.length - origin.repeated
    kept = [each for each in parent.held if each.start < origin.kept]
    repeated = [
        Held(each.turn, each.is_answer, each.start - first_repeated + origin.kept)
        for each in parent.held
        if each.start >= max(first_repeated, origin.kept)
    ]
    content.copied = tuple(kept + repeated)
    content.held = list(content.copied)
    content.ids = parent.ids[: TOKEN_BYTES * origin.kept]
    return content
