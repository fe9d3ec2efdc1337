"""Cuts of an episode's context: decided by turns, messages and settings alone."""

from __future__ import annotations

import msgspec
import pytest

from fleetbus.config.settings import EnvironmentSettings
from fleetbus.core.episode.history import Turn
from fleetbus.core.episode.segments import SegmentError
from fleetbus_schemas import NEW_ROOT, Action, ChatMessage, ContextChange, Image, SegmentOrigin, ShownImage, Text
from fleetbus_schemas.tokens import pack_ids
from fleetbus_workers.environment.adapters.mcp.context_tools import ContextTools
from fleetbus_workers.environment.episode.segments import FIRST, EpisodeContext, Placement, find_context_tokens
from fleetbus_workers.environment.episode.token_estimate import TokenEstimate

SETTINGS = EnvironmentSettings(compaction="drop", compaction_share=0.5, compaction_turns=2)
SHOWN = (ChatMessage(role="user", content="x" * 10),)


def play(context: EpisodeContext, turns: int, placement: Placement = FIRST, *, delta: int = 10, sampled: int = 5) -> None:
    """Each turn adds ``delta`` tokens for ten characters, and ``sampled`` tokens."""
    for _ in range(turns):
        repeated = placement.origin.repeated if placement.origin is not None else 0
        action = Action(
            episode_id="e",
            attempt=1,
            turn=0,
            text="",
            prompt_delta=pack_ids(range(repeated + delta)),
            sampled=pack_ids(range(sampled)),
            segment=placement.segment,
            origin=placement.origin,
        )
        context.append(Turn(sequence=1, lane="e0", action=action), SHOWN)
        placement = context.extend()


def test_a_context_is_compacted_when_what_comes_would_fill_the_share() -> None:
    context = EpisodeContext(SETTINGS, max_tokens=100)
    play(context, 2)
    assert context.held == 30
    assert not context.needs_compaction(SHOWN)
    assert context.needs_compaction((ChatMessage(role="user", content="x" * 21),)), "21 characters are 21 tokens so far"


def answer(tokens: int, *images: tuple[int, int], repeated: int = 0) -> Action:
    """An Action upon messages that became so many tokens, with images among them."""
    origin = SegmentOrigin(parent=0, kept=1, reason="context_dropped", repeated=repeated) if repeated else None
    shown = tuple(ShownImage(object="x", start=start, stop=stop) for start, stop in images)
    return Action(episode_id="e", attempt=1, turn=0, text="", prompt_delta=pack_ids(range(tokens)), images=shown, origin=origin)


def test_short_messages_and_images_say_nothing_about_how_many_tokens_a_long_text_becomes() -> None:
    page = (ChatMessage(role="user", content="x" * 4000),)
    estimate = TokenEstimate()
    estimate.learn((ChatMessage(role="user", content="x" * 1000),), answer(250))
    estimate.learn((ChatMessage(role="user", content="ok"),), answer(12))
    picture = (ChatMessage(role="user", content=(Text(text="here"), Image(object="x"))),)
    estimate.learn(picture, answer(930, (125, 925), repeated=120))
    assert estimate.estimate(page) == 1000
    assert estimate.estimate(picture) == pytest.approx(800 + 24), "an image as those before, and few words as few words before"
    assert estimate.estimate((ChatMessage(role="user", content="fine"),)) == pytest.approx(24)


def test_the_prompt_and_the_last_turns_stay() -> None:
    context = EpisodeContext(SETTINGS, max_tokens=100)
    play(context, 3)
    placement = context.drop_turns(2, "context_dropped")
    assert placement == Placement(
        segment=1, origin=SegmentOrigin(parent=0, kept=10, reason="context_dropped", repeated=20), segments=2
    )
    assert context.count_held(placement) == 30, "what a status line before its first turn tells of"
    play(context, 1, placement)
    assert (context.held, context.tokens) == (10 + 20 + 10 + 5, 45 + 35)
    assert [segment.tokens for segment in context.segments] == [45, 45]


def test_fewer_turns_stay_where_those_would_fill_it_again() -> None:
    context = EpisodeContext(SETTINGS, max_tokens=100)
    play(context, 4)
    placement = context.compact((ChatMessage(role="user", content="x" * 30),))
    assert placement is not None and placement.origin is not None
    assert placement.origin.repeated == 5, "one turn: its answer, which nothing was shown after"


def test_turns_are_dropped_again_from_a_segment_that_repeats_some() -> None:
    context = EpisodeContext(SETTINGS, max_tokens=100)
    play(context, 3)
    placement = context.drop_turns(2, "context_dropped")
    assert placement is not None
    play(context, 1, placement)
    again = context.drop_turns(1, "context_dropped")
    assert again is not None and again.origin == SegmentOrigin(parent=1, kept=10, reason="context_dropped", repeated=5)


def test_nothing_is_dropped_where_there_is_nothing_but_the_last_turns() -> None:
    context = EpisodeContext(SETTINGS, max_tokens=100)
    play(context, 2)
    assert context.change(ContextChange(keep_turns=2)) == FIRST


def test_a_new_prompt_begins_a_root_and_an_earlier_segment_is_gone_on_with() -> None:
    context = EpisodeContext(SETTINGS, max_tokens=100)
    play(context, 1)
    placement = context.change(ContextChange(reason="sub_agent"))
    assert placement.origin == SegmentOrigin(parent=NEW_ROOT, kept=0, reason="sub_agent")
    play(context, 1, placement)
    assert context.change(ContextChange(resume=0)) == Placement(segment=0, segments=2)
    with pytest.raises(SegmentError):
        context.change(ContextChange(resume=2))


def test_a_context_is_as_long_as_the_episode_unless_turns_may_be_dropped() -> None:
    assert find_context_tokens(EnvironmentSettings(), 1000, 250) == 1000
    assert find_context_tokens(SETTINGS, 1000, 250) == 250
    assert find_context_tokens(EnvironmentSettings(context_tools=True), 1000, 0) == 1000


def test_the_policy_drops_turns_with_a_tool_and_is_told_of_wrong_arguments() -> None:
    tools = ContextTools(1000)
    assert tools.call("manage_context", {"keep_recent_turns": "two"}, []).failed
    assert tools.take_change() is None
    assert "last 2 turns" in str(tools.call("manage_context", {"keep_recent_turns": 2}, []).content)
    assert tools.take_change() == ContextChange(keep_turns=2)
    assert tools.take_change() is None, "it is asked for once"


def test_the_tools_count_what_the_present_context_holds() -> None:
    tools = ContextTools(1000)
    first = Action(episode_id="e", attempt=1, turn=0, text="", prompt_delta=pack_ids(range(10)), sampled=pack_ids(range(5)))
    tools.record_action(first)
    origin = SegmentOrigin(parent=0, kept=8, reason="context_dropped")
    tools.record_action(msgspec.structs.replace(first, turn=1, segment=1, origin=origin))
    assert (tools.turns, tools.tokens) == (2, 8 + 15)
