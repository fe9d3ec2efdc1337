"""Calls beside the task: answered, not trained, counted."""

from __future__ import annotations

import pytest

from fleetbus_schemas import Action, ChatMessage, FinishReason, ToolSpec, UntrainedTurn
from fleetbus_workers.environment.adapters.agent.conversations import Conversations
from fleetbus_workers.environment.adapters.agent.dialects import DIALECTS
from fleetbus_workers.environment.adapters.agent.dialects.base import AgentCall
from fleetbus_workers.environment.adapters.agent.sessions import AgentSession
from fleetbus_workers.environment.adapters.agent.side_calls import SMALL_TOKENS, Line, find_side_turns
from tests.agents.endpoint_support import BODIES, CHAT, GEMINI, MESSAGES, RESPONSES

MAIN, OTHER = (b"main",), (b"other",)
WORKING = Line(system=MAIN, has_tools=True, turns=[0, 2, 3])
"""The agent's own line."""

TABLE: dict[str, tuple[list[Line], list[int]]] = {
    "the title of a chat": ([WORKING, Line(system=OTHER, turns=[1])], [1]),
    "a title before the agent works": ([Line(system=OTHER, turns=[0]), Line(has_tools=True, turns=[1])], [0]),
    "a check of the quota, by few tokens": ([WORKING, Line(system=MAIN, max_tokens=1, turns=[1])], [1]),
    "a probe without a system prompt": ([WORKING, Line(turns=[1])], [1]),
    "two of them": ([WORKING, Line(system=OTHER, turns=[4]), Line(turns=[1])], [1, 4]),
    "an agent without tools": ([Line(system=MAIN, turns=[0, 2]), Line(system=OTHER, turns=[1])], []),
    "its own prompt without tools": ([WORKING, Line(system=MAIN, max_tokens=SMALL_TOKENS + 1, turns=[1])], []),
    "a sub-agent with tools": ([WORKING, Line(system=OTHER, has_tools=True, turns=[1])], []),
    "a line that goes on": ([WORKING, Line(system=OTHER, turns=[1, 4])], []),
    "a summary of the conversation": ([WORKING, Line(system=OTHER, is_fresh=False, turns=[1])], []),
    "a line that was not answered": ([WORKING, Line(system=OTHER)], []),
    "nothing": ([], []),
}


@pytest.mark.parametrize(("lines", "turns"), TABLE.values(), ids=TABLE)
def test_side_calls_are_told_by_their_shape(lines: list[Line], turns: list[int]) -> None:
    assert find_side_turns(lines) == turns


LOOK = (ToolSpec(name="look"),)


async def play(
    conversations: Conversations, session: AgentSession, call: AgentCall, digest: str, finish_reason: FinishReason = "stop"
) -> str:
    pending = session.enter(call, digest, repetition=False)
    async with pending.hold_request():
        assert await conversations.receive_call() is not None
        conversations.answer(Action(episode_id="e", attempt=1, turn=0, text=digest, finish_reason=finish_reason))
        pending.delivered = True
    return (await pending.wait()).text


@pytest.mark.parametrize("trains", [False, True])
async def test_a_title_is_answered_and_not_trained_unless_that_is_wanted(trains: bool) -> None:
    session = AgentSession(key="k")
    conversations = Conversations(session, trains_side_calls=trains)
    said: tuple[ChatMessage, ...] = (ChatMessage(role="system", content="Work."), ChatMessage(role="user", content="Go."))
    titled = (ChatMessage(role="system", content="Write a title."), ChatMessage(role="user", content="Go."))
    await play(conversations, session, AgentCall(messages=said, tools=LOOK), "first")
    assert await play(conversations, session, AgentCall(messages=titled), "title") == "title"
    said += (ChatMessage(role="assistant", content="first"), ChatMessage(role="user", content="On."))
    await play(conversations, session, AgentCall(messages=said, tools=LOOK), "second")
    wanted = () if trains else (UntrainedTurn(turn=1, reason="side_call"),)
    assert conversations.list_untrained() == wanted
    assert conversations.describe().get("side_calls", 0) == len(wanted)


@pytest.mark.parametrize("works_before", [False, True])
async def test_an_agent_that_breaks_after_a_probe_does_not_break_for_the_policys_answer(works_before: bool) -> None:
    """A check of the quota asks for one token, so that its answer is cut."""
    session = AgentSession(key="k")
    conversations = Conversations(session)
    said = (ChatMessage(role="user", content="Go."),)
    if works_before:
        await play(conversations, session, AgentCall(messages=said, tools=LOOK), "first")
    await play(conversations, session, AgentCall(messages=said, max_tokens=1), "probe", finish_reason="length")
    assert conversations.find_fault() == {}
    await play(conversations, session, AgentCall(messages=said, tools=LOOK, max_tokens=9), "cut", finish_reason="length")
    assert conversations.find_fault()["problems"] == ["cut after 0 tokens"]


@pytest.mark.parametrize(
    ("path", "field"),
    [
        (CHAT, {"max_tokens": 5}),
        (CHAT, {"max_completion_tokens": 5, "max_tokens": 9}),
        (RESPONSES, {"max_output_tokens": 5}),
        (MESSAGES, {"max_tokens": 5}),
        (GEMINI, {"generationConfig": {"maxOutputTokens": 5}}),
    ],
)
def test_how_many_tokens_a_call_asks_for_is_read_in_every_protocol(path: str, field: dict[str, object]) -> None:
    dialect = DIALECTS.get(path) or DIALECTS["/v1beta/models/{model}:{method}"]
    body = BODIES[path] | field | {"method": "generateContent"}
    assert dialect.parse(body).max_tokens == 5
    assert dialect.parse(BODIES[path] | {"max_tokens": None, "method": "generateContent"}).max_tokens is None
