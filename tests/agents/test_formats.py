"""Formats that agents want of answers: read from each protocol, told to the policy, and no break of the conversation."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from fleetbus_schemas import ChatMessage, ToolCall
from fleetbus_workers.environment.adapters.agent.dialects import DIALECTS
from fleetbus_workers.environment.adapters.agent.dialects.base import AgentCall
from fleetbus_workers.environment.adapters.agent.dialects.formats import (
    PREFIX,
    Format,
    find_unkept,
    read_choice,
    read_json_format,
)
from fleetbus_workers.environment.adapters.agent.endpoint import parse_call
from fleetbus_workers.environment.adapters.agent.paths import Paths
from fleetbus_workers.environment.adapters.agent.side_calls import describe_line
from fleetbus_workers.environment.adapters.agent.stored_responses import StoredResponses
from tests.agents.endpoint_support import BODIES, CHAT, GEMINI, MESSAGES, RESPONSES

SCHEMA = {"type": "object", "properties": {"sum": {"type": "integer"}}, "required": ["sum"]}
JSON = (
    'JSON of this schema and nothing else. {"properties": {"sum": {"type": "integer"}}, "required": ["sum"], "type": "object"}'
)
CALL = "a call of look."

WISHES: list[tuple[str, dict[str, Any], list[str]]] = [
    (CHAT, {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}}, [JSON]),
    (CHAT, {"response_format": {"type": "json_object"}}, ["one JSON object and nothing else."]),
    (CHAT, {"response_format": {"type": "text"}, "tool_choice": "auto"}, []),
    (CHAT, {"tool_choice": "required"}, [CALL]),
    (CHAT, {"tool_choice": {"type": "function", "function": {"name": "look"}}}, [CALL]),
    (
        CHAT,
        {
            "tool_choice": {
                "type": "allowed_tools",
                "allowed_tools": {"mode": "auto", "tools": [{"function": {"name": "look"}}]},
            }
        },
        [],
    ),
    (RESPONSES, {"text": {"format": {"type": "json_schema", "name": "s", "schema": SCHEMA}}}, [JSON]),
    (RESPONSES, {"text": {"verbosity": "low"}, "tool_choice": {"type": "function", "name": "look"}}, [CALL]),
    (RESPONSES, {"tool_choice": {"type": "allowed_tools", "mode": "required", "tools": [{"name": "look"}]}}, [CALL]),
    (MESSAGES, {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}, []),
    (MESSAGES, {"tool_choice": {"type": "any"}}, [CALL]),
    (MESSAGES, {"tool_choice": {"type": "tool", "name": "look"}}, [CALL]),
    (MESSAGES, {"output_format": {"type": "json_schema", "schema": SCHEMA}}, [JSON]),
    (MESSAGES, {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}}, [JSON]),
    (GEMINI, {"generationConfig": {"responseMimeType": "application/json", "responseSchema": SCHEMA}}, [JSON]),
    (GEMINI, {"toolConfig": {"functionCallingConfig": {"mode": "ANY", "allowedFunctionNames": ["look"]}}}, [CALL]),
]


def parse(path: str, fields: dict[str, Any], **changed: Any) -> AgentCall:
    """As the endpoint parses the body of this path."""
    named = {"model": "policy", "method": "generateContent"} if path == GEMINI else {}
    dialect = next(dialect for route, dialect in DIALECTS.items() if (path == GEMINI and "model" in route) or route == path)
    return parse_call(dialect, msgspec.json.encode(BODIES[path] | fields | changed), named)


@pytest.mark.parametrize(("path", "fields", "told"), WISHES)
def test_a_format_that_is_wanted_is_told_after_the_system_messages(path: str, fields: dict[str, Any], told: list[str]) -> None:
    plain, call = parse(path, {}), parse(path, fields)
    assert [each.told for each in call.formats] == told
    added = [message for message in call.messages if message not in plain.messages]
    assert [message.content for message in added] == [PREFIX + " ".join(told)] * bool(told)
    assert (
        all(message.role == "system" for message in call.messages[: len(call.messages) - len(plain.messages) + 1]) or not told
    )
    assert call.tools == plain.tools, "the policy is offered the same tools"


TABLE: dict[str, tuple[Format, str, tuple[ToolCall, ...], list[str]]] = {
    "JSON": (read_json_format("f", SCHEMA), '{"sum": 3}', (), []),
    "no JSON": (read_json_format("f", SCHEMA), "It is 3.", (), ["no JSON, which f asks for"]),
    "a key too few": (read_json_format("f", SCHEMA), "{}", (), ["no sum in the JSON, which f asks for"]),
    "a list": (read_json_format("f", SCHEMA), "[]", (), ["no sum in the JSON, which f asks for"]),
    "any object": (read_json_format("f"), "{}", (), []),
    "a call before it": (read_json_format("f", SCHEMA), "", (ToolCall(name="look"),), []),
    "the call": (read_choice("f", ["look"], forced=True), "", (ToolCall(name="look"),), []),
    "no call": (read_choice("f", ["look"], forced=True), "3", (), ["no call of look, which f asks for"]),
    "another": (read_choice("f", ["look"], forced=True), "", (ToolCall(name="go"),), ["no call of look, which f asks for"]),
    "a free choice": (read_choice("f", ["look"], forced=False), "3", (), []),
    "deep": (read_json_format("f"), "[" * 99_999, (), ["no JSON, which f asks for"]),
}


@pytest.mark.parametrize(("wanted", "text", "calls", "unkept"), TABLE.values(), ids=TABLE)
def test_what_an_answer_does_not_keep_is_named(
    wanted: Format, text: str, calls: tuple[ToolCall, ...], unkept: list[str]
) -> None:
    assert list(find_unkept((wanted,), text, calls)) == unkept


def test_a_call_that_wants_the_same_format_continues_the_one_before() -> None:
    paths, wish = Paths(), {"response_format": {"type": "json_object"}}
    first = parse(CHAT, wish)
    paths.attach(first.messages, first.tools)
    paths.add_answer(0, ChatMessage(role="assistant", content="{}"))
    said = [*BODIES[CHAT]["messages"], {"role": "assistant", "content": "{}"}, {"role": "user", "content": "Again."}]
    second = parse(CHAT, wish, messages=said)
    attached = paths.attach(second.messages, second.tools)
    assert (attached.segment, [message.content for message in attached.messages]) == (0, ["Again."])
    third = parse(CHAT, {}, messages=said)
    assert paths.attach(third.messages, third.tools).segment == 1, "what the policy reads is something else"


def test_a_stored_response_is_continued_with_the_format_of_the_new_call() -> None:
    responses, first = (
        StoredResponses(),
        parse(RESPONSES, {"text": {"format": {"type": "json_object"}}, "instructions": "Be brief."}),
    )
    responses.add_messages(0, first.messages)
    responses.add_answer(0, "1", ChatMessage(role="assistant", content="{}"))
    again = parse(RESPONSES, {"text": {"format": {"type": "json_object"}}, "instructions": "Be brief."}, input="More.")
    whole = responses.expand(msgspec.structs.replace(again, previous="resp_1")).messages
    answered = (*first.messages, ChatMessage(role="assistant", content="{}"), ChatMessage(role="user", content="More."))
    assert whole == answered


def test_a_format_makes_no_side_call_of_a_question_with_the_same_system_prompt() -> None:
    plain, wanted = parse(CHAT, {}), parse(CHAT, {"response_format": {"type": "json_object"}})
    assert describe_line(plain.messages, (), None).system == describe_line(wanted.messages, (), None).system
