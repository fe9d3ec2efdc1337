"""Calls that continue a response of their session, by its id."""

from __future__ import annotations

import msgspec
import pytest

from fleetbus_schemas import Action, ChatMessage, Observation, ToolCall, ToolSpec
from fleetbus_workers.environment.adapters.agent.conversations import Conversations
from fleetbus_workers.environment.adapters.agent.dialects import responses
from fleetbus_workers.environment.adapters.agent.dialects.base import AgentCall, Answer, InvalidCall
from fleetbus_workers.environment.adapters.agent.dialects.formats import tell_formats
from fleetbus_workers.environment.adapters.agent.sessions import AgentSession
from tests.agents.endpoint_support import BODIES, RESPONSES, serving

CALL = ToolCall(name="look", arguments={}, id="call00000")
LOOK = [{"type": "function", "name": "look", "parameters": {}}]


def act(turn: int, *calls: ToolCall) -> Action:
    return Action(episode_id="e", attempt=1, turn=turn, text="<tool_call>" if calls else f"answer {turn}", tool_calls=calls)


def ask(text: str, previous: str = "", **more: object) -> AgentCall:
    items = [{"role": "user", "content": text}]
    return responses.parse(
        {"input": items, "instructions": "Be brief.", "previous_response_id": previous, "tools": LOOK} | more
    )


async def play(conversations: Conversations, session: AgentSession, call: AgentCall, action: Action) -> Answer:
    pending = session.enter(call, f"{call}", repetition=False)
    async with pending.hold_request():
        attached = await conversations.receive_call()
        assert attached is not None and attached.segment == 0, "it continues the conversation"
        return conversations.answer(action)


async def test_a_call_that_sends_only_what_is_new_continues_the_conversation() -> None:
    session = AgentSession(key="k")
    conversations = Conversations(session)
    first = await play(conversations, session, ask("Go."), act(0, CALL))
    shown = responses.render(first, "m")
    result = [{"type": "function_call_output", "call_id": shown["output"][-1]["call_id"], "output": "seen"}]
    second = await play(conversations, session, ask("", shown["id"], input=result), act(1))
    await play(conversations, session, ask("On.", f"resp_{second.id}"), act(2))
    said = [(message.role, message.content) for message in conversations.messages]
    words = ["Be brief.", "Go.", "", "seen", "answer 1", "On.", "answer 2"]
    assert [content for _, content in said] == words and said[3][0] == "tool"
    assert conversations.messages[3].tool_call_id == "call00000", "results have the template's ids"


async def test_a_gateway_that_takes_over_knows_the_responses_of_before() -> None:
    first = await play(Conversations(session := AgentSession(key="k")), session, ask("Go."), act(0))
    session = AgentSession(key="k")
    conversations = Conversations(session)
    observed = Observation(
        episode_id="e",
        attempt=1,
        turn=0,
        policy="p",
        messages=(ChatMessage(role="system", content="Be brief."), ChatMessage(role="user", content="Go.")),
        tools=(ToolSpec(name="look"),),
        tokens_left=100,
        environment_lane="e0",
        deadline_ns=1,
    )
    conversations.restore_call(observed)
    conversations.answer(act(0))
    await play(conversations, session, ask("On.", f"resp_{first.id}"), act(1))


def test_new_instructions_take_the_place_of_earlier_ones_and_none_leave_them() -> None:
    session = AgentSession(key="k")
    said = (ChatMessage(role="system", content="Be brief."), ChatMessage(role="user", content="Go."))
    session.responses.add_messages(0, said)
    session.responses.add_answer(0, "r", ChatMessage(role="assistant", content="x"))
    for instructions, wanted in (("Be long.", "Be long."), (None, "Be brief.")):
        expanded = session.responses.expand(ask("On.", "resp_r", instructions=instructions))
        assert [message.content for message in expanded.messages] == [wanted, "Go.", "x", "On."]


async def test_a_response_of_nobodys_is_refused_by_the_code_that_clients_know() -> None:
    async with serving() as (client, _):
        answer = await client.post(RESPONSES, json=BODIES[RESPONSES] | {"previous_response_id": "resp_other"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "previous_response_not_found")
    session = AgentSession(key="k")
    session.end()
    assert session.enter(ask("x", "resp_1"), "d", repetition=False).answer, "a session that is over says so all the same"
    with pytest.raises(InvalidCall):
        AgentSession(key="k").responses.expand(msgspec.structs.replace(ask("x"), previous="resp_1"))


async def test_items_of_answers_that_are_only_named_are_what_was_answered() -> None:
    session = AgentSession(key="k")
    conversations = Conversations(session)
    first = await play(conversations, session, ask("Go."), act(0, CALL, msgspec.structs.replace(CALL, id="call00001")))
    *_, one, two = responses.render(first, "m")["output"]
    results = [{"type": "function_call_output", "call_id": each["call_id"], "output": "seen"} for each in (one, two)]
    named = [{"type": "item_reference", "id": each["id"]} for each in (one, two)]
    said = [{"role": "user", "content": "Go."}, {"type": "item_reference", "id": "rs_1"}, *named, *results]
    call = ask("", input=said)
    second = await play(conversations, session, call, act(1))
    item = {"type": "item_reference", "id": responses.render(second, "m")["output"][0]["id"]}
    call = ask("", input=[*said, item, {"role": "user", "content": "On."}])
    await play(conversations, session, call, act(2))
    assert [str(message.content) for message in conversations.messages][-3:] == ["answer 1", "On.", "answer 2"]
    with pytest.raises(InvalidCall, match="no response of this session"):
        session.enter(ask("", input=[{"type": "item_reference", "id": "msg_x"}]), "d", repetition=False)


async def test_items_are_found_behind_a_message_that_tells_a_format() -> None:
    session = AgentSession(key="k")
    conversations = Conversations(session)
    first = await play(conversations, session, ask("Go."), act(0))
    item = {"type": "item_reference", "id": responses.render(first, "m")["output"][0]["id"]}
    wanted = {"format": {"type": "json_object"}}
    call = responses.parse({"instructions": "Be brief.", "input": [{"role": "user", "content": "Go."}, item], "text": wanted})
    call = msgspec.structs.replace(call, messages=tell_formats(call.messages, call.formats))
    assert session.responses.expand(call).messages[-1].content == "answer 0"
