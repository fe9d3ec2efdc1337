"""Calls of agents in the protocols that they speak to language models: bodies, frames and rewards that policies may write."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import msgspec

from fleetbus_schemas import ToolCall
from fleetbus_workers.environment.adapters.agent.dialects import DIALECTS, gemini
from fleetbus_workers.environment.adapters.agent.dialects.base import Answer, InvalidCall
from fleetbus_workers.environment.adapters.agent.dialects.formats import find_unkept
from fleetbus_workers.environment.adapters.agent.endpoint import parse_call, parse_reward
from fleetbus_workers.gateway import openenv_frames as frames
from fleetbus_workers.gateway.openenv_frames import FrameError
from tests.fuzz.mutation import write_json

ANSWER = Answer(number=1, text="{}", id="a", tool_calls=(ToolCall(id="c", name="f", arguments={}),), stop_reason="tool_calls")
NAMED = {"model": "m", "method": "streamGenerateContent"}
"""What the path of a call to Gemini says."""


def run(data: bytes) -> None:
    """Parse a body in every protocol, and answer what was understood."""
    for dialect in {id(each): each for each in DIALECTS.values()}.values():
        try:
            call = parse_call(dialect, data, NAMED if dialect is gemini else {})
        except InvalidCall as invalid:
            json.dumps(dialect.render_error(400, str(invalid), invalid.code))
            continue
        json.dumps(dialect.render(ANSWER, call.model))
        b"".join(dialect.stream(ANSWER, call.model, usage=call.stream_usage))
        list(find_unkept(call.formats, ANSWER.text, ANSWER.tool_calls))
    parse_reward(data)
    _read_frame(data)


def _read_frame(data: bytes) -> None:
    try:
        _, content = frames.read_frame(data.decode())
        fields: dict[str, Any] = frames.read_object(content)
    except (UnicodeDecodeError, FrameError):  # the WebSocket refuses what is no UTF-8
        return
    for read in (
        lambda: frames.read_action(fields),
        lambda: frames.read_request_id(fields),
        lambda: frames.read_id(fields.get("id")),
        lambda: frames.read_seed(fields.get("seed")),
    ):
        with suppress(FrameError):
            read()


TREE = (msgspec.json.decode, write_json)


def list_seeds() -> Iterator[bytes]:
    """One full call of each protocol, and one frame."""
    schema = {"type": "object", "properties": {"x": {"type": "string"}}, "required": ["x"]}
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x": "1"}'}}
    bodies: list[object] = [
        {
            "model": "m",
            "messages": [
                {"role": "system", "content": "s"},
                {"role": "user", "content": [{"type": "text", "text": "u"}]},
                {"role": "assistant", "content": None, "tool_calls": [call]},
                {"role": "tool", "tool_call_id": "c1", "content": "r"},
            ],
            "tools": [{"type": "function", "function": {"name": "f", "description": "d", "parameters": schema}}],
            "tool_choice": {"type": "function", "function": {"name": "f"}},
            "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}},
            "stream": True,
            "stream_options": {"include_usage": True},
            "max_completion_tokens": 9,
            "stop": ["x"],
        },
        {
            "model": "m",
            "instructions": "s",
            "previous_response_id": "resp_1",
            "input": [
                {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "u"}]},
                {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "x"},
                {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "r"}]},
                {"type": "item_reference", "id": "msg_1"},
            ],
            "tools": [{"type": "function", "name": "f", "parameters": schema}, {"type": "web_search"}],
            "tool_choice": {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "f"}]},
            "text": {"format": {"type": "json_schema", "name": "n", "schema": schema}},
            "max_output_tokens": 9,
            "stream": True,
        },
        {
            "model": "m",
            "system": [{"type": "text", "text": "s", "cache_control": {"type": "ephemeral"}}],
            "messages": [
                {"role": "user", "content": "u"},
                {"role": "assistant", "content": [{"type": "tool_use", "id": "c1", "name": "f", "input": {"x": "1"}}]},
                {
                    "role": "user",
                    "content": [{"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "r"}]}],
                },
            ],
            "tools": [{"name": "f", "description": "d", "input_schema": schema}],
            "tool_choice": {"type": "tool", "name": "f"},
            "max_tokens": 9,
            "stop_sequences": ["x"],
            "stream": True,
        },
        {
            "systemInstruction": {"parts": [{"text": "s"}]},
            "contents": [
                {"role": "user", "parts": [{"text": "u"}]},
                {"role": "model", "parts": [{"functionCall": {"id": "c1", "name": "f", "args": {"x": "1"}}}]},
                {"role": "user", "parts": [{"functionResponse": {"id": "c1", "name": "f", "response": {"output": "r"}}}]},
            ],
            "tools": [{"functionDeclarations": [{"name": "f", "description": "d", "parametersJsonSchema": schema}]}],
            "toolConfig": {"functionCallingConfig": {"mode": "ANY", "allowedFunctionNames": ["f"]}},
            "generationConfig": {
                "maxOutputTokens": 9,
                "stopSequences": ["x"],
                "responseMimeType": "application/json",
                "responseSchema": schema,
            },
        },
        {
            "type": "step",
            "data": {"type": "call_tool", "tool_name": "f", "arguments": {"x": 1}, "metadata": {"request_id": "r"}, "seed": 1},
        },
        {"reward": 0.5, "reason": "r"},
    ]
    yield from (msgspec.json.encode(body) for body in bodies)
