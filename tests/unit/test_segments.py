"""The tree of an episode: which sequences its turns make, and that each sampled token is trained once, whatever the tree."""

from __future__ import annotations

from collections.abc import Sequence
from unittest.mock import Mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleetbus.core.episode import segments as segments_module
from fleetbus.core.episode.history import Turn, collect_token_ids, loss_mask
from fleetbus.core.episode.segments import (
    Segment,
    SegmentError,
    collect_segment_ids,
    describe_segments,
    find_leaves,
    fold_segments,
    hash_segments,
    join_ids,
    place_in_segment,
    split_first,
)
from fleetbus_schemas import NEW_ROOT, Action, EpisodeSegment, SegmentOrigin, SegmentReason, ShownImage
from fleetbus_schemas.tokens import extend_history, pack_ids, start_history
from tests.support.histories import history_hash


def turn(
    number: int,
    delta: Sequence[int],
    sampled: Sequence[int],
    *,
    segment: int = 0,
    origin: SegmentOrigin | None = None,
    images: tuple[ShownImage, ...] = (),
) -> Turn:
    action = Action(
        episode_id="e",
        attempt=1,
        turn=number,
        text="",
        prompt_delta=pack_ids(delta),
        sampled=pack_ids(sampled),
        segment=segment,
        origin=origin,
        images=images,
    )
    return Turn(sequence=number, lane="e1", action=action)


def leave(parent: int, kept: int, reason: SegmentReason = "context_dropped", repeated: int = 0) -> SegmentOrigin:
    return SegmentOrigin(parent=parent, kept=kept, reason=reason, repeated=repeated)


DROPPED = [
    turn(0, [1, 2], [3]),
    turn(1, [4], [5, 6]),
    turn(2, [7], [8]),
    turn(3, [7, 8, 9], [10], segment=1, origin=leave(0, 2, repeated=2)),
    turn(4, [11], [12], segment=1),
]


def test_one_segment_is_the_whole_history() -> None:
    turns = DROPPED[:3]
    segments = fold_segments(turns)
    assert [collect_segment_ids(segment, turns) for segment in segments] == [collect_token_ids(turns)]
    assert segments[0].spans == [(0, 8)]
    assert hash_segments(turns, segments) == (history_hash(turns),)
    assert find_leaves(segments) == segments
    assert describe_segments(segments) == ()


def test_a_segment_after_dropped_turns_begins_with_what_it_keeps_and_repeats() -> None:
    segments = fold_segments(DROPPED)
    assert collect_segment_ids(segments[1], DROPPED) == [1, 2, 7, 8, 9, 10, 11, 12]
    assert segments[1].answers == [3, 5, 7], "the repeated answer, and its own two"
    assert describe_segments(segments) == (
        EpisodeSegment(origin=None, first_turn=0, turns=3, tokens=8),
        EpisodeSegment(origin=leave(0, 2, repeated=2), first_turn=3, turns=2, tokens=8),
    )


def test_a_segment_may_be_gone_on_with_after_another_was_played() -> None:
    turns = [
        turn(0, [1], [2]),
        turn(1, [9], [8], segment=1, origin=leave(NEW_ROOT, 0, "sub_agent")),
        turn(2, [3], [4]),
    ]
    segments = fold_segments(turns)
    assert [collect_segment_ids(segment, turns) for segment in segments] == [[1, 2, 3, 4], [9, 8]]
    assert [segment.turns for segment in segments] == [[0, 2], [1]]


def test_a_segment_that_another_keeps_whole_is_no_leaf() -> None:
    turns = [turn(0, [1], [2]), turn(1, [3], [4], segment=1, origin=leave(0, 2, "history_edited"))]
    assert [leaf.number for leaf in find_leaves(fold_segments(turns))] == [1]
    grown = [*turns, turn(2, [5], [6])]
    assert [leaf.number for leaf in find_leaves(fold_segments(grown))] == [0, 1]


def test_a_sampled_token_that_two_leaves_hold_is_trained_in_the_first() -> None:
    turns = [turn(0, [1], [2]), turn(1, [3], [4]), turn(2, [5], [6], segment=1, origin=leave(0, 2, "history_edited"))]
    first, second = split_first(find_leaves(fold_segments(turns)))
    assert first == [((0, 4), True)]
    assert second == [((0, 2), False), ((4, 6), True)]


def test_the_chain_of_a_segment_begins_with_what_it_keeps() -> None:
    expected = start_history(pack_ids([1, 2]))
    for delta, sampled in [([7, 8, 9], [10]), ([11], [12])]:
        expected = extend_history(expected, pack_ids(delta), pack_ids(sampled))
    assert hash_segments(DROPPED, fold_segments(DROPPED)) == (history_hash(DROPPED[:3]), expected)


def test_images_stand_where_the_segment_has_their_tokens() -> None:
    shown = ShownImage(object="a" * 64, start=1, stop=2)
    turns = [
        turn(0, [1, 5], [2], images=(shown,)),
        turn(1, [3, 5], [4], images=(shown,)),
        turn(2, [3, 5], [6], segment=1, origin=leave(0, 2), images=(shown,)),
    ]
    flat = [ShownImage(object="a" * 64, start=place, stop=place + 1) for place in (1, 4, 7)]
    segments = fold_segments(turns)
    assert [image.start for image in place_in_segment(segments[0], flat)] == [1, 4]
    assert [image.start for image in place_in_segment(segments[1], flat)] == [1, 3]


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 60), st.integers(0, 9)), max_size=9),
    st.lists(st.tuples(st.integers(0, 60), st.integers(0, 5)), max_size=9),
)
def test_an_image_is_found_in_each_span_that_holds_the_whole_of_it_and_in_no_other(
    spans: list[tuple[int, int]], images: list[tuple[int, int]]
) -> None:
    segment = Segment(number=0, spans=[(start, start + length) for start, length in spans])
    shown = [ShownImage(start=start, stop=start + length, object=str(number)) for number, (start, length) in enumerate(images)]
    begins = [sum(length for _, length in spans[:number]) for number in range(len(spans))]
    expected = [
        (each.object, begin + each.start - start)
        for begin, (start, length) in zip(begins, spans, strict=True)
        for each in sorted(shown, key=lambda each: each.start)
        if start <= each.start and each.stop <= start + length
    ]
    assert [(each.object, each.start) for each in place_in_segment(segment, shown)] == expected


@pytest.mark.parametrize(
    "turns",
    [
        [turn(0, [1], [2], segment=1)],
        [turn(0, [1], [2], origin=leave(NEW_ROOT, 0))],
        [turn(0, [1], [2]), turn(1, [1], [2], segment=1)],
        [turn(0, [1], [2]), turn(1, [1], [2], segment=2, origin=leave(0, 1))],
        [turn(0, [1], [2]), turn(1, [1], [2], segment=1, origin=leave(0, 3))],
        [turn(0, [1], [2]), turn(1, [1], [2], segment=1, origin=leave(0, 1, repeated=2))],
        [turn(0, [1], [2]), turn(1, [1], [2], segment=1, origin=leave(0, -1))],
        [turn(0, [1], [2]), turn(1, [1], [2], segment=1, origin=leave(1, 0))],
        [turn(0, [1], [2]), turn(1, [1], [2], segment=1, origin=leave(NEW_ROOT, 1))],
        [turn(0, [1], [2]), turn(1, [1], [2], segment=-1)],
        [turn(0, [1], [2]), turn(1, [1], [2], origin=leave(0, 1))],
    ],
    ids=lambda turns: "/".join(f"{each.action.segment}:{each.action.origin and each.action.origin.kept}" for each in turns),
)
def test_turns_that_are_no_tree_are_refused(turns: list[Turn]) -> None:
    with pytest.raises(SegmentError):
        fold_segments(turns)


class Context:
    """A model of an agent's own view: each segment is a plain list of (id, the turn that sampled it or None)."""

    def __init__(self) -> None:
        self.sequences: list[list[tuple[int, int | None]]] = []
        self.turns: list[Turn] = []
        self.next_id = 0

    def play(self, kind: str, parent: int, cut: int, tail: int, delta: int, sampled: int) -> None:
        number = len(self.turns)
        segment, origin, repeated = parent, None, []
        if not self.sequences or kind == "root":
            self.sequences.append([])
            segment = len(self.sequences) - 1
            origin = leave(NEW_ROOT, 0, "sub_agent") if segment else None
        elif kind == "fork":
            before = self.sequences[parent]
            kept = cut % (len(before) + 1)
            length = min(tail, len(before) - kept)
            repeated = [one for one, _ in before[len(before) - length :]]
            self.sequences.append(before[:kept])
            segment = len(self.sequences) - 1
            origin = leave(parent, kept, repeated=length)
        prompt = repeated + [self.new_id() for _ in range(delta)]
        answer = [self.new_id() for _ in range(sampled)]
        self.sequences[segment] += [(one, None) for one in prompt] + [(one, number) for one in answer]
        self.turns.append(turn(number, prompt, answer, segment=segment, origin=origin))

    def new_id(self) -> int:
        self.next_id += 1
        return self.next_id


move = st.tuples(
    st.sampled_from(["extend", "extend", "fork", "root"]),
    st.integers(0, 20),
    st.integers(0, 40),
    st.integers(0, 6),
    st.integers(0, 3),
    st.integers(1, 3),
)


@pytest.mark.integration
@settings(deadline=None, max_examples=300)
@given(st.lists(move, min_size=1, max_size=12))
def test_whatever_the_tree_each_sampled_token_is_trained_once_after_what_it_was_sampled_after(
    moves: list[tuple[str, int, int, int, int, int]],
) -> None:
    context = Context()
    for kind, parent, cut, tail, delta, sampled in moves:
        context.play(kind, parent % max(1, len(context.sequences)), cut, tail, delta, sampled)
    turns = context.turns
    segments = fold_segments(turns)
    assert [collect_segment_ids(segment, turns) for segment in segments] == [
        [one for one, _ in sequence] for sequence in context.sequences
    ]
    flat, mask = collect_token_ids(turns), loss_mask(turns)
    leaves = find_leaves(segments)
    trained: list[int] = []
    for leaf, parts in zip(leaves, split_first(leaves), strict=True):
        places = [place for (start, stop), _ in parts for place in range(start, stop)]
        assert [flat[place] for place in places] == collect_segment_ids(leaf, turns)
        own = [place for (start, stop), first in parts for place in range(start, stop) if first and mask[place]]
        trained += own
        prefixes = {place: tuple(flat[before] for before in places[:index]) for index, place in enumerate(places)}
        assert all(prefixes[place] == sampled_after(context, flat[place]) for place in own)
    assert sorted(trained) == [place for place, sampled in enumerate(mask) if sampled]
    assert len(hash_segments(turns, segments)) == len(segments)


def sampled_after(context: Context, token: int) -> tuple[int, ...]:
    """The tokens before one that was sampled, in the segment that it was sampled in: the ids are all different, so a
    sampled one stands as sampled first where it was made."""
    for sequence in context.sequences:
        for index, (one, number) in enumerate(sequence):
            if one == token and number is not None:
                return tuple(before for before, _ in sequence[:index])
    raise AssertionError(token)


def test_the_ids_of_all_turns_are_joined_once_for_all_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else an episode of a thousand segments that keep a part of their parent holds its reader's loop for seconds."""
    join = Mock(side_effect=join_ids)
    monkeypatch.setattr(segments_module, "join_ids", join)
    turns = [turn(0, [1, 2], [3]), *(turn(number, [4], [5], segment=number, origin=leave(0, 2)) for number in range(1, 9))]
    assert len(set(hash_segments(turns, fold_segments(turns)))) == 2
    join.assert_called_once()
