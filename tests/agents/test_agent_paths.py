"""The earlier turns that a call of an agent continues."""

from __future__ import annotations

import pytest

from fleetbus_schemas import ChatMessage, ToolCall, ToolSpec
from fleetbus_workers.environment.adapters.agent.dialects.base import InvalidCall
from fleetbus_workers.environment.adapters.agent.paths import TURN_BYTES, Paths

SYSTEM = ChatMessage(role="system", content="Be brief.")
TOOL = ToolSpec(name="look")


def user(text: str) -> ChatMessage:
    return ChatMessage(role="user", content=text)


def assistant(text: str, *calls: ToolCall) -> ChatMessage:
    return ChatMessage(role="assistant", content=text, tool_calls=calls)


def begin(*messages: ChatMessage, answer: ChatMessage, tools: tuple[ToolSpec, ...] = ()) -> Paths:
    paths = Paths()
    first = paths.attach(messages, tools)
    assert (first.segment, first.messages, first.reason) == (0, messages, None)
    paths.add_answer(0, answer)
    return paths


def test_a_call_that_begins_with_an_earlier_one_continues_it() -> None:
    paths = begin(SYSTEM, user("a"), answer=assistant("b"))
    following = paths.attach([SYSTEM, user("a"), assistant(" b\n"), user("c")], ())
    assert (following.segment, following.messages, following.reason) == (0, (user("c"),), None)
    assert paths.extended == 1


def test_arguments_are_equal_as_json_and_ids_of_calls_may_differ() -> None:
    call = ToolCall(name="look", arguments={"at": 1, "from": [2]}, id="call00000", arguments_text='{"at":1,"from":[2]}')
    paths = begin(user("a"), answer=assistant("", ToolCall(name="look", arguments={"from": [2], "at": 1}, id="x")))
    again = assistant("", ToolCall(name=call.name, arguments=call.arguments, id="y"))
    result = ChatMessage(role="tool", content="seen", tool_call_id="x")
    assert paths.attach([user("a"), again, result], ()).messages == (result,)


def test_an_earlier_conversation_is_taken_up_again() -> None:
    paths = begin(SYSTEM, user("a"), answer=assistant("b"))
    other = paths.attach([ChatMessage(role="system", content="Look."), user("sub")], ())
    assert (other.segment, other.reason) == (1, "sub_agent")
    paths.add_answer(1, assistant("done"))
    back = paths.attach([SYSTEM, user("a"), assistant("b"), user("c")], ())
    assert (back.segment, back.messages) == (0, (user("c"),))


def test_a_sub_agent_may_begin_with_the_same_instructions() -> None:
    paths = begin(SYSTEM, user("here"), user("a"), answer=assistant("b"))
    assert paths.attach([SYSTEM, user("here"), user("sub")], ()).reason == "sub_agent"
    assert paths.attach([SYSTEM, user("here"), user("sum"), assistant("b"), user("c")], ()).reason == "history_edited"


def test_the_same_question_again_is_another_sample() -> None:
    paths = begin(SYSTEM, user("a"), answer=assistant("b"))
    assert paths.attach([SYSTEM, user("a")], ()).segment == 1


@pytest.mark.parametrize(
    ("messages", "tools", "reason"),
    [
        ([SYSTEM, user("a"), assistant("b"), user("c")], (TOOL,), "tools_changed"),
        ([ChatMessage(role="system", content="Be long."), user("a"), assistant("b"), user("c")], (), "system_changed"),
        ([SYSTEM, user("a"), user("summary of b")], (), "history_edited"),
        ([SYSTEM, user("another task")], (), "sub_agent"),
    ],
)
def test_why_a_conversation_begins_anew_is_told(messages: list[ChatMessage], tools: tuple[ToolSpec, ...], reason: str) -> None:
    paths = begin(SYSTEM, user("a"), answer=assistant("b"))
    begun = paths.attach(messages, tools)
    assert (begun.segment, begun.messages, begun.tools, begun.reason) == (1, tuple(messages), tools, reason)
    assert paths.reasons == {reason: 1}


def test_a_hash_that_changes_with_every_request_is_no_difference() -> None:
    def system(number: str) -> ChatMessage:
        header = f"x-anthropic-billing-header: cc_version=2; cch={number};\n"
        return ChatMessage(role="system", content=f"{header}You are an agent.")

    paths = begin(system("0a1"), user("a"), answer=assistant("b"))
    assert paths.attach([system("9f2"), user("a"), assistant("b"), user("c")], ()).segment == 0


def test_a_call_of_more_than_a_turn_holds_changes_nothing() -> None:
    paths = begin(SYSTEM, user("a"), answer=assistant("b"))
    with pytest.raises(InvalidCall, match="a turn holds"):
        paths.attach([SYSTEM, user("x" * TURN_BYTES)], ())
    following = paths.attach([SYSTEM, user("a"), assistant("b"), user("c")], ())
    assert (following.segment, paths.reasons) == (0, {})
