"""The description of an episode's segments: which turns belong to which, and what was left out."""

from __future__ import annotations

from fleetbus.core.episode.turn_contexts import describe_turns
from fleetbus_schemas import NEW_ROOT, Action, SegmentOrigin
from fleetbus_schemas.tokens import pack_ids


def act(prompt: int, sampled: int, segment: int = 0, origin: SegmentOrigin | None = None) -> Action:
    ids = pack_ids(range(prompt)), pack_ids(range(sampled))
    return Action(
        episode_id="e", attempt=1, turn=0, text="", prompt_delta=ids[0], sampled=ids[1], segment=segment, origin=origin
    )


PLAYED = [
    act(10, 5),
    act(4, 5),
    act(4, 5),
    act(5 + 6, 5, 1, SegmentOrigin(parent=0, kept=10, reason="context_dropped", repeated=5)),
    act(20, 5, 2, SegmentOrigin(parent=NEW_ROOT, kept=0, reason="sub_agent")),
    act(3, 5, 1),
]


def test_a_turn_has_its_segment_what_that_holds_and_what_was_left_out_of_it() -> None:
    contexts = describe_turns(PLAYED)
    assert [(each.segment, each.tokens) for each in contexts] == [(0, 15), (0, 24), (0, 33), (1, 26), (2, 25), (1, 34)]
    assert [each.begins for each in contexts] == [
        "",
        "",
        "",
        "segment 1 begins (context dropped): keeps 10 tokens of segment 0 and repeats 5; 2 turns, 18 tokens left out",
        "segment 2 begins (sub agent) with a new prompt",
        "",
    ]


def test_turns_that_are_no_tree_are_described_as_far_as_they_are() -> None:
    assert len(describe_turns([*PLAYED[:2], act(1, 1, 7), *PLAYED])) == 2
