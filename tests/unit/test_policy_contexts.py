"""Clients that drive an environment step by step have the contexts that the run's own policy would have had."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetbus.client.contexts import PolicyContexts, describe_context
from fleetbus.config.settings import EnvironmentSettings
from fleetbus.core.episode.history import Turn
from fleetbus.core.episode.segments import collect_segment_ids, fold_segments
from fleetbus_schemas import Action, ChatMessage, ContextChange, SessionAnswer, ToolSpec
from fleetbus_schemas.tokens import pack_ids
from fleetbus_workers.environment.episode.segments import FIRST, EpisodeContext

DROP = st.integers(1, 4).map(lambda turns: ContextChange(keep_turns=turns))
CHANGES = st.lists(st.one_of(st.none(), DROP, st.just(ContextChange()), st.integers(0, 3)), max_size=12)


def say(text: str) -> tuple[ChatMessage, ...]:
    return (ChatMessage(role="user", content=text),)


def step(number: int, change: ContextChange | None = None) -> SessionAnswer:
    return SessionAnswer(session="s", key="k", messages=say(f"shown {number}"), context=change)


def read(messages: Sequence[ChatMessage]) -> list[str]:
    return [str(message.content) for message in messages]


@given(CHANGES)
def test_they_are_those_of_an_episode_that_workers_play(drawn: list[ContextChange | int | None]) -> None:
    """Played with one token for each message and each answer."""
    contexts, context = PolicyContexts(say("shown 0")), EpisodeContext(EnvironmentSettings(), max_tokens=1000)
    turns: list[Turn] = []
    placement = FIRST
    for number, wanted in enumerate([*drawn, None]):
        segments = fold_segments(turns)
        repeated: list[int] = []
        if placement.origin is not None and placement.origin.repeated:
            repeated = collect_segment_ids(segments[placement.origin.parent], turns)[-placement.origin.repeated :]
        action = Action(
            episode_id="e",
            attempt=1,
            turn=number,
            text="",
            prompt_delta=pack_ids([*repeated, 2 * number]),
            sampled=pack_ids([2 * number + 1]),
            segment=placement.segment,
            origin=placement.origin,
        )
        turns.append(Turn(sequence=number, lane="e1", action=action))
        context.append(turns[-1], ())
        held = collect_segment_ids(fold_segments(turns)[placement.segment], turns)
        read_now = [*read(contexts.messages), f"said {number}"]
        assert read_now == [f"said {id_ // 2}" if id_ % 2 else f"shown {id_ // 2}" for id_ in held]
        change = ContextChange(resume=wanted % len(contexts.segments)) if isinstance(wanted, int) else wanted
        contexts.extend(f"said {number}", step(number + 1, change))
        placement = context.extend() if change is None else context.change(change)
    assert len(contexts.segments) == len(fold_segments(turns))


def test_a_new_prompt_has_the_tools_that_it_comes_with_and_an_earlier_segment_those_that_it_had() -> None:
    look, act = ToolSpec(name="look"), ToolSpec(name="act")
    contexts = PolicyContexts(say("task"), (look,))
    contexts.extend("call a helper", step(1, ContextChange(reason="sub_agent", tools=(act,))))
    assert (read(contexts.messages), contexts.tools) == (["shown 1"], (act,))
    contexts.extend("done", step(2, ContextChange(resume=0)))
    assert (read(contexts.messages), contexts.tools) == (["task", "call a helper", "shown 2"], (look,))


def test_a_segment_that_was_never_begun_is_refused() -> None:
    with pytest.raises(ValueError, match="segment 3 cannot be gone on with: 1 were begun"):
        PolicyContexts(say("task")).extend("one", step(1, ContextChange(resume=3)))


def test_clients_of_other_protocols_are_told_of_a_change_and_of_nothing_else() -> None:
    assert describe_context(None) == {}
    told = {"context": {"reason": "context_dropped", "keep_turns": 2, "resume": None}}
    assert describe_context(ContextChange(keep_turns=2)) == told
