"""The segments of an episode as a fold of its turns: the token sequences that were sampled from, and what is trained. Pure.

The tokens of all turns - prompt delta 0, sampled 0, prompt delta 1, ... - stand once, in the Actions. A segment is a list of
spans of them: what it keeps of its parent, then its own turns. So a token that several segments share has one place only, and
what is known of tokens (mask, log-probabilities, versions, advantages) is taken from there. A sampled token is trained
once: in the first leaf that holds it.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Protocol, TypeVar

import msgspec

from fleetbus.core.episode.history import Turn, collect_images
from fleetbus_schemas import NEW_ROOT, Action, EpisodeSegment, SegmentOrigin
from fleetbus_schemas.tokens import TOKEN_BYTES, count_tokens, extend_history, start_history, unpack_ids

Span = tuple[int, int]
"""Places ``[start, stop)`` among the tokens of all turns."""


class SegmentError(ValueError):
    """Turns that are no tree: a segment that was never begun, or one that keeps what its parent does not have."""


class Segment(msgspec.Struct, kw_only=True):
    """One token sequence: the ``spans`` of all turns' tokens that it consists of, ``length`` tokens.

    ``turns`` are those played in it, ``answers`` the places in the sequence where an answer of the policy begins: its own
    turns', and those that it keeps or repeats.
    """

    number: int
    origin: SegmentOrigin | None = None
    spans: list[Span] = msgspec.field(default_factory=list)
    length: int = 0
    turns: list[int] = msgspec.field(default_factory=list)
    answers: list[int] = msgspec.field(default_factory=list)

    def extend(self, spans: Iterable[Span]) -> None:
        for start, stop in spans:
            self.length += stop - start
            if self.spans and self.spans[-1][1] == start:
                self.spans[-1] = (self.spans[-1][0], stop)
            elif start < stop:
                self.spans.append((start, stop))


class SegmentTree:
    """The segments of an episode, turn by turn. ``tokens`` is how many the turns so far have added."""

    __slots__ = ("segments", "tokens", "turns")

    def __init__(self) -> None:
        self.segments: list[Segment] = []
        self.tokens = 0
        self.turns = 0

    def append(self, action: Action) -> Segment:
        """Add the next turn, and return the segment that it belongs to. Raises `SegmentError`, and changes nothing then."""
        prompt, sampled = count_tokens(action.prompt_delta), count_tokens(action.sampled)
        return self.add(action.segment, action.origin, prompt=prompt, sampled=sampled)

    def add(self, number: int, origin: SegmentOrigin | None, *, prompt: int, sampled: int) -> Segment:
        """The same for a turn of which only the numbers of its tokens are known."""
        if number == len(self.segments):
            segment = self.begin(origin)
            self.segments.append(segment)
        elif 0 <= number < len(self.segments) and origin is None:
            segment = self.segments[number]
        else:
            raise SegmentError(f"turn {self.turns} is of segment {number}; before it {len(self.segments)} were begun")
        stop = self.tokens + prompt + sampled
        segment.answers.append(segment.length + prompt)
        segment.turns.append(self.turns)
        segment.extend([(self.tokens, stop)])
        self.tokens = stop
        self.turns += 1
        return segment

    def begin(self, origin: SegmentOrigin | None) -> Segment:
        """The next segment before its first turn, with what it keeps; not yet one of the tree. Raises `SegmentError`."""
        number = len(self.segments)
        segment = Segment(number=number, origin=origin)
        if origin is None or origin.parent == NEW_ROOT:
            if (origin is None) != (number == 0) or (origin is not None and (origin.kept or origin.repeated)):
                raise SegmentError(f"segment {number} does not say what it leaves, or keeps tokens of nothing")
            return segment
        if not 0 <= origin.parent < number:
            raise SegmentError(f"segment {number} leaves segment {origin.parent}, which was not begun before it")
        parent = self.segments[origin.parent]
        if min(origin.kept, origin.repeated) < 0 or origin.kept + origin.repeated > parent.length:
            raise SegmentError(
                f"segment {number} keeps {origin.kept} and repeats {origin.repeated} of the {parent.length} tokens of segment "
                f"{origin.parent}"
            )
        segment.extend(cut_spans(parent.spans, origin.kept))
        first_repeated = parent.length - origin.repeated
        segment.answers = [place for place in parent.answers if place < origin.kept]
        segment.answers += [place - first_repeated + origin.kept for place in parent.answers if place >= first_repeated]
        return segment


def fold_segments(turns: Iterable[Turn] | Iterable[Action]) -> tuple[Segment, ...]:
    """The segments of a history (`history.fold_history`), by number; of one without turns there are none."""
    tree = SegmentTree()
    for turn in turns:
        tree.append(turn.action if isinstance(turn, Turn) else turn)
    return tuple(tree.segments)


def describe_segments(segments: Sequence[Segment]) -> tuple[EpisodeSegment, ...]:
    """The segments as a result carries them: none if there is one only."""
    if len(segments) < 2:
        return ()
    return tuple(
        EpisodeSegment(origin=segment.origin, first_turn=segment.turns[0], turns=len(segment.turns), tokens=segment.length)
        for segment in segments
    )


def find_leaves(segments: Sequence[Segment]) -> tuple[Segment, ...]:
    """The segments that are sequences of their own: no other one keeps the whole of them."""
    continued = {
        segment.origin.parent
        for segment in segments
        if segment.origin is not None
        and segment.origin.parent != NEW_ROOT
        and segment.origin.kept == segments[segment.origin.parent].length
    }
    return tuple(segment for segment in segments if segment.number not in continued)


def split_first(leaves: Iterable[Segment]) -> list[list[tuple[Span, bool]]]:
    """Of each leaf its spans, in parts of which each says whether no leaf before holds it: there its sampled tokens are
    trained."""
    held: list[Span] = []
    parts = []
    for leaf in leaves:
        parts.append(list(chain.from_iterable(_split_span(span, held) for span in leaf.spans)))
        held = _merge_spans([*held, *leaf.spans])
    return parts


def _split_span(span: Span, held: Sequence[Span]) -> list[tuple[Span, bool]]:
    """``span`` in parts; ``held`` are spans in order that do not touch."""
    start, stop = span
    parts: list[tuple[Span, bool]] = []
    for first, last in held:
        if last <= start or first >= stop:
            continue
        if start < first:
            parts.append(((start, first), True))
        parts.append(((max(start, first), min(stop, last)), False))
        start = min(stop, last)
    if start < stop:
        parts.append(((start, stop), True))
    return parts


def _merge_spans(spans: list[Span]) -> list[Span]:
    merged: list[Span] = []
    for start, stop in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
        else:
            merged.append((start, stop))
    return merged


def cut_spans(spans: Iterable[Span], length: int) -> list[Span]:
    """The first ``length`` tokens of a sequence."""
    kept = []
    for start, stop in spans:
        if length <= 0:
            break
        kept.append((start, min(stop, start + length)))
        length -= stop - start
    return kept


def pack_segment_ids(segment: Segment, actions: Iterable[Action]) -> bytes:
    """The packed ids of a segment's whole sequence."""
    return _cut_ids(segment, join_ids(actions))


def join_ids(actions: Iterable[Action]) -> bytes:
    """The packed ids of all turns, one after another, as the spans of segments count them."""
    return b"".join(chain.from_iterable((action.prompt_delta, action.sampled) for action in actions))


def _cut_ids(segment: Segment, joined: bytes) -> bytes:
    return b"".join(joined[TOKEN_BYTES * start : TOKEN_BYTES * stop] for start, stop in segment.spans)


def collect_segment_ids(segment: Segment, turns: Sequence[Turn]) -> list[int]:
    """The token ids of a segment's whole sequence."""
    return unpack_ids(pack_segment_ids(segment, [turn.action for turn in turns]))


class Placed(Protocol):
    """Anything that stands for tokens ``[start, stop)``, as `ShownImage`."""

    @property
    def start(self) -> int: ...
    @property
    def stop(self) -> int: ...


P = TypeVar("P", bound=Placed)


def _get_start(placed: Placed) -> int:
    return placed.start


def place_in_segment(segment: Segment, placed: Iterable[P]) -> list[P]:
    """Move places among the tokens of all turns to those of this segment's sequence, as far as it holds them."""
    found: list[P] = []
    everything = sorted(placed, key=_get_start)
    starts = list(map(_get_start, everything))
    length = 0
    for start, stop in segment.spans if everything else ():
        for each in everything[bisect_left(starts, start) : bisect_right(starts, stop)]:
            if each.stop <= stop:
                by = length - start
                found.append(msgspec.structs.replace(each, start=each.start + by, stop=each.stop + by))  # type: ignore[type-var]
        length += stop - start
    return found


def hash_segments(turns: Sequence[Turn], segments: Sequence[Segment]) -> tuple[bytes, ...]:
    """The history hash of each segment after its last turn. Each is a chain of its own, which begins with what it keeps."""
    kept = hash_kept(segments, turns)
    return tuple(_extend_by_turns(digest, segment, turns) for digest, segment in zip(kept, segments, strict=True))


def hash_segment(segment: Segment, segments: Sequence[Segment], turns: Sequence[Turn]) -> bytes:
    """That of one segment."""
    (digest,) = hash_kept(segments, turns, [segment])
    return _extend_by_turns(digest, segment, turns)


def _extend_by_turns(digest: bytes, segment: Segment, turns: Sequence[Turn]) -> bytes:
    for turn in segment.turns:
        action = turns[turn].action
        digest = extend_history(digest, action.prompt_delta, action.sampled, [image.object for image in action.images])
    return digest


def hash_kept(segments: Sequence[Segment], turns: Sequence[Turn], of: Sequence[Segment] | None = None) -> list[bytes]:
    """The hashes that the chains of these segments, else of all, begin with. The ids of all turns are joined once for all."""
    of = segments if of is None else of
    joined: bytes | None = None
    digests = []
    for segment in of:
        origin = segment.origin
        if origin is None or not origin.kept:
            digests.append(start_history(b""))
            continue
        if joined is None:
            joined, shown = join_ids(turn.action for turn in turns), collect_images(turns)
        kept = Segment(number=-1)
        kept.extend(cut_spans(segments[origin.parent].spans, origin.kept))
        images = [image.object for image in place_in_segment(kept, shown)]
        digests.append(start_history(_cut_ids(kept, joined), images))
    return digests
