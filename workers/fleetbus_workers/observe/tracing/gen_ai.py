"""Attributes of OpenTelemetry's semantic conventions for generative AI, and messages in the JSON that they define.

Names are those of the registry (`opentelemetry-semantic-conventions`); a test holds each against it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from fleetbus_schemas import NEW_ROOT, Action, ChatMessage, SegmentOrigin, ToolCall, ToolSpec
from fleetbus_schemas.chat import Image, Text
from fleetbus_schemas.tokens import count_tokens
from fleetbus_workers.observe.tracing.span import Value

OPERATION = "gen_ai.operation.name"
PROVIDER = "gen_ai.provider.name"
CONVERSATION = "gen_ai.conversation.id"
AGENT = "gen_ai.agent.name"
MODEL = "gen_ai.request.model"
INPUT_TOKENS = "gen_ai.usage.input_tokens"
OUTPUT_TOKENS = "gen_ai.usage.output_tokens"
FINISH_REASONS = "gen_ai.response.finish_reasons"
TOOL = "gen_ai.tool.name"
TOOL_DEFINITIONS = "gen_ai.tool.definitions"
CALL_ID = "gen_ai.tool.call.id"
CALL_ARGUMENTS = "gen_ai.tool.call.arguments"
CALL_RESULT = "gen_ai.tool.call.result"
INPUT = "gen_ai.input.messages"
OUTPUT = "gen_ai.output.messages"

INPUT_TEXT = "input.value"
OUTPUT_TEXT = "output.value"
"""OpenInference's, which Phoenix lists: the newest message and the answer as plain texts."""

PROVIDED = "fleetbus"
FINISHED = {"stop": "stop", "length": "length", "failed": "error"}


def describe_agent(operation: str, conversation: str, agent: str) -> dict[str, Value]:
    """Attributes of every operation of an agent: the episode or session is its conversation."""
    named: dict[str, Value] = {AGENT: agent} if agent else {}
    return {OPERATION: operation, CONVERSATION: conversation} | named


def describe_calls(calls: Sequence[ToolCall]) -> dict[str, Value]:
    """The names of the tools that a turn calls, one after another."""
    return {TOOL: ", ".join(call.name for call in calls)}


def describe_call_content(calls: Sequence[ToolCall], results: Sequence[ChatMessage]) -> dict[str, Value]:
    """Arguments and result of a turn's only call; those of several are in the messages alone, which name each."""
    if len(calls) != 1:
        return {}
    about: dict[str, Value] = {CALL_ID: calls[0].id} if calls[0].id else {}
    about[CALL_ARGUMENTS] = about[INPUT_TEXT] = _encode(calls[0].arguments)
    answers = [message for message in results if message.role == "tool"] or list(results)
    if answers:
        about[CALL_RESULT] = about[OUTPUT_TEXT] = "\n".join(map(_join_texts, answers))
    return about


def describe_input(messages: Sequence[ChatMessage], tools: Sequence[ToolSpec]) -> dict[str, Value]:
    """A prompt, or what a turn adds to one."""
    about: dict[str, Value] = {INPUT: encode_input(messages)}
    if messages:
        about[INPUT_TEXT] = _join_texts(messages[-1])
    if tools:
        about[TOOL_DEFINITIONS] = encode_tools(tools)
    return about


def describe_output(action: Action) -> dict[str, Value]:
    """One answer."""
    return {OUTPUT: encode_output(action), OUTPUT_TEXT: action.text}


def encode_input(messages: Iterable[ChatMessage]) -> str:
    """``gen_ai.input.messages``."""
    return _encode([_build_message(message) for message in messages])


def encode_output(action: Action) -> str:
    """``gen_ai.output.messages`` of one answer."""
    parts = _build_text_parts(action.text) + [_build_call(call) for call in action.tool_calls]
    return _encode([{"role": "assistant", "parts": parts, "finish_reason": _find_finish_reason(action)}])


def encode_tools(tools: Iterable[ToolSpec]) -> str:
    """``gen_ai.tool.definitions``."""
    return _encode(
        [
            {"type": "function", "name": tool.name, "description": tool.description, "parameters": tool.parameters}
            for tool in tools
        ]
    )


class PromptLengths:
    """The tokens of every prompt of an episode, turn by turn: what stands in its segment before it, and what it adds."""

    def __init__(self) -> None:
        self._turns: dict[int, tuple[int, int]] = {}

    def add(self, action: Action) -> int:
        """The tokens of the prompt that ``action`` answers. A turn that is played again replaces itself and what followed."""
        for turn in [turn for turn in reversed(self._turns) if turn >= action.turn]:
            del self._turns[turn]
        prompt = self._find_begin(action.segment, action.origin) + count_tokens(action.prompt_delta)
        self._turns[action.turn] = (action.segment, prompt + count_tokens(action.sampled))
        return prompt

    def _find_begin(self, segment: int, origin: SegmentOrigin | None) -> int:
        if origin is not None:
            return 0 if origin.parent == NEW_ROOT else max(origin.kept, 0)
        return next((length for number, length in reversed(self._turns.values()) if number == segment), 0)


def _find_finish_reason(action: Action) -> str:
    return "tool_call" if action.tool_calls and action.finish_reason == "stop" else FINISHED[action.finish_reason]


def _build_message(message: ChatMessage) -> dict[str, Any]:
    parts: list[dict[str, Any]] = [{"type": "reasoning", "content": message.reasoning}] if message.reasoning else []
    if message.role == "tool":
        text = _join_texts(message)
        identified = {"id": message.tool_call_id} if message.tool_call_id else {}
        parts.append({"type": "tool_call_response", **identified, "response": text})
        parts += [part for part in _build_parts(message) if part["type"] != "text"]
    else:
        parts += _build_parts(message)
    parts += [_build_call(call) for call in message.tool_calls]
    named = {"name": message.name} if message.name else {}
    return {"role": message.role, "parts": parts} | named


def _build_parts(message: ChatMessage) -> list[dict[str, Any]]:
    content = message.content
    return _build_text_parts(content) if isinstance(content, str) else [_build_part(part) for part in content]


def _build_part(part: Text | Image) -> dict[str, Any]:
    """One part; an object of the run is named, not carried."""
    if isinstance(part, Image):
        return {"type": "file", "modality": "image", "mime_type": part.media_type, "file_id": part.object}
    if part.object:
        return {"type": "file", "modality": "text", "mime_type": "text/plain", "file_id": part.object}
    return {"type": "text", "content": part.text}


def _build_text_parts(text: str) -> list[dict[str, Any]]:
    return [{"type": "text", "content": text}] if text else []


def _join_texts(message: ChatMessage) -> str:
    return "".join(part["content"] for part in _build_parts(message) if part["type"] == "text")


def _build_call(call: ToolCall) -> dict[str, Any]:
    identified = {"id": call.id} if call.id else {}
    return {"type": "tool_call", **identified, "name": call.name, "arguments": call.arguments}


def _encode(value: object) -> str:
    return msgspec.json.encode(value).decode()
