"""Ids of calls and answers are unique in a session and among sessions, and the policy's template sees its own."""

from __future__ import annotations

import re
from typing import Any

import msgspec
import pytest

from fleetbus_schemas import Action, ChatMessage, ToolCall, ToolSpec
from fleetbus_workers.environment.adapters.agent.conversations import Conversations
from fleetbus_workers.environment.adapters.agent.dialects import chat_completions, messages, responses
from fleetbus_workers.environment.adapters.agent.dialects.base import AgentCall, Answer
from fleetbus_workers.environment.adapters.agent.sessions import AgentSession

LOOK, SEARCH = ToolSpec(name="look", description="", parameters={}), ToolSpec(name="search", description="", parameters={})


def act(turn: int) -> Action:
    """What an inference worker says in the first turn of a segment: its calls are numbered from 0 again."""
    call = ToolCall(name="look", arguments={}, id="call00000")
    return Action(episode_id="e", attempt=1, turn=turn, text="<tool_call>", tool_calls=(call,))


async def play(conversations: Conversations, session: AgentSession, asked: AgentCall, turn: int) -> Answer:
    pending = session.enter(asked, f"digest{turn}", repetition=False)
    async with pending.hold_request():
        assert await conversations.receive_call() is not None
        return conversations.answer(act(turn))


async def test_a_segment_that_begins_in_mid_conversation_repeats_no_id_of_a_call() -> None:
    session = AgentSession()
    conversations = Conversations(session)
    said: tuple[ChatMessage, ...] = (ChatMessage(role="user", content="Go."),)
    first = await play(conversations, session, AgentCall(messages=said, tools=(LOOK,)), 1)
    said += (ChatMessage(role="assistant", content=first.text, tool_calls=first.tool_calls),)
    said += (ChatMessage(role="tool", content="seen", tool_call_id=first.tool_calls[0].id),)
    second = await play(conversations, session, AgentCall(messages=said, tools=(LOOK, SEARCH)), 2)
    assert conversations.describe()["segments_begun"] == {"tools_changed": 1}
    assert first.tool_calls[0].id != second.tool_calls[0].id and first.id != second.id


async def test_what_an_agent_sends_back_has_the_ids_of_the_template_again() -> None:
    session = AgentSession()
    conversations = Conversations(session)
    said: tuple[ChatMessage, ...] = (ChatMessage(role="user", content="Go."),)
    first = await play(conversations, session, AgentCall(messages=said, tools=(LOOK,)), 1)
    said += (ChatMessage(role="assistant", content=first.text, tool_calls=first.tool_calls),)
    said += (ChatMessage(role="tool", content="seen", tool_call_id=first.tool_calls[0].id),)
    pending = session.enter(AgentCall(messages=said, tools=(LOOK,)), "digest", repetition=False)
    async with pending.hold_request():
        attached = await conversations.receive_call()
        assert attached is not None and attached.segment == 0
        assert [message.tool_call_id for message in attached.messages] == ["call00000"]
        conversations.answer(act(2))


EDIT = ToolSpec(
    name="look",
    parameters={"properties": {"all": {"type": "boolean", "default": False}, "at": {"default": 1}, "from": {"type": "string"}}},
)


@pytest.mark.parametrize(
    ("sent_back", "reason"),
    [
        ({"all": False}, {}),
        ({"all": False, "at": 1}, {}),
        ({"all": True}, {"history_edited": 1}),
        ({"all": 0}, {"history_edited": 1}),
        ({"from": ""}, {"history_edited": 1}),
    ],
)
async def test_a_default_of_the_schema_that_an_agent_fills_in_edits_no_history(
    sent_back: dict[str, Any], reason: dict[str, int]
) -> None:
    session = AgentSession()
    conversations = Conversations(session)
    said: tuple[ChatMessage, ...] = (ChatMessage(role="system", content="S"), ChatMessage(role="user", content="Go."))
    first = await play(conversations, session, AgentCall(messages=said, tools=(EDIT,)), 1)
    (call,) = first.tool_calls
    filled = msgspec.structs.replace(call, arguments=sent_back)
    said += (ChatMessage(role="assistant", content=first.text, tool_calls=(filled,)),)
    said += (ChatMessage(role="tool", content="seen", tool_call_id=call.id),)
    await play(conversations, session, AgentCall(messages=said, tools=(EDIT,)), 2)
    assert conversations.describe()["segments_begun"] == reason


async def test_a_gateway_that_takes_over_gives_the_ids_that_were_given_and_another_session_has_others() -> None:
    asked = AgentCall(messages=(ChatMessage(role="user", content="Go."),), tools=(LOOK,))
    given = []
    for key in ("one", "one", "another"):
        session = AgentSession(key=key)
        given.append(await play(Conversations(session), session, asked, 1))
    assert (given[0].id, given[0].tool_calls) == (given[1].id, given[1].tool_calls)
    assert given[0].id != given[2].id and given[0].tool_calls[0].id != given[2].tool_calls[0].id


async def test_each_protocol_has_its_own_form_of_ids() -> None:
    session = AgentSession()
    asked = AgentCall(messages=(ChatMessage(role="user", content="Go."),), tools=(LOOK,))
    answer = await play(Conversations(session), session, asked, 1)
    chat = chat_completions.render(answer, "m")
    assert re.fullmatch(r"chatcmpl-\w{24}", chat["id"]) and chat["created"] > 1_700_000_000
    (call,) = chat["choices"][0]["message"]["tool_calls"]
    assert re.fullmatch(r"call_\w{24}", call["id"])
    said = messages.render(answer, "m")
    assert re.fullmatch(r"msg_\w{24}", said["id"]) and re.fullmatch(r"toolu_\w{24}", said["content"][-1]["id"])
    response = responses.render(answer, "m")
    assert re.fullmatch(r"resp_\w{24}", response["id"]) and response["output"][-1]["call_id"] == call["id"]
    back = (ChatMessage(role="tool", content="", tool_call_id=said["content"][-1]["id"]),)
    assert session.call_ids.restore(back, ())[0].tool_call_id == "call00000"
