"""The template of servers that take messages and not tokens: one id per UTF-8 byte of the conversation, and no model. Pure.

What such a server saw and said stands in the log as every other turn does, and can be read back into messages without a
tokenizer. Nothing can be trained on it. Above it is `fleetbus_workers.inference.chat`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from fleetbus.core.text.tool_formats import HERMES, ParsedResponse, number_calls, parse_response
from fleetbus_schemas import ChatMessage, SegmentReason, ToolSpec

END = 256
"""Ends a message."""

ANSWER = 257
"""Begins one of the server's own, which is plain text; all others are JSON."""


class ChatTranscript:
    """`Template` of ids below 258."""

    stop_ids: frozenset[int] = frozenset({END})
    renders_history = False

    def encode_prompt(self, messages: Sequence[ChatMessage], tools: Sequence[ToolSpec]) -> list[int]:
        shown = [*msgspec.json.encode(tuple(tools)), END] if tools else []
        return shown + self.encode_continuation((END,), messages)

    def encode_continuation(self, last_sampled: Sequence[int], messages: Sequence[ChatMessage]) -> list[int]:
        ids = [] if END in last_sampled else [END]
        for message in messages:
            ids += [*msgspec.json.encode(message), END]
        return [*ids, ANSWER]

    def encode_conversation(self, messages: Sequence[ChatMessage], tools: Sequence[ToolSpec]) -> list[int]:
        raise NotImplementedError("messages are sent as they are, and no history is rendered")

    def explain_rendering(self, conversation: Sequence[ChatMessage], rendered: Sequence[int]) -> SegmentReason:
        return "history_edited"

    def encode_text(self, text: str) -> list[int]:
        """The ids of a whole answer."""
        return [*text.encode("utf-8", "replace"), END]

    def decode_text(self, ids: Sequence[int]) -> str:
        return bytes(token for token in ids if token < END).decode("utf-8", "replace")

    def parse_text(self, text: str, tools: Sequence[ToolSpec], *, calls_before: int = 0) -> ParsedResponse:
        return number_calls(parse_response(text, HERMES, tools), HERMES, calls_before)

    def token_to_id(self, token: str) -> int | None:
        return None


class Conversation(msgspec.Struct, frozen=True):
    """``messages`` and ``tools`` as the API of chat completions takes them."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]


def read_conversation(ids: Sequence[int]) -> Conversation:
    """The conversation that `ChatTranscript` wrote, with the answers between. Raises `ValueError` for any other ids."""
    template = ChatTranscript()
    messages: list[dict[str, Any]] = []
    tools: tuple[ToolSpec, ...] = ()
    calls = 0
    for part in _split(ids):
        if part[0] == ANSWER:
            parsed = template.parse_text(template.decode_text(part[1:]), tools, calls_before=calls)
            calls += len(parsed.calls)
            message = ChatMessage(role="assistant", content=parsed.content, tool_calls=parsed.calls)
        else:
            text = bytes(part)
            if text.startswith(b"["):
                tools = msgspec.json.decode(text, type=tuple[ToolSpec, ...])
                continue
            message = msgspec.json.decode(text, type=ChatMessage)
        messages.append(_describe_message(message))
    return Conversation(messages, [{"type": "function", "function": _describe_tool(tool)} for tool in tools])


def format_answer(message: object) -> str:
    """The text of an answer of the API, its calls in the format that `ChatTranscript` reads. Raises `ValueError` if it is
    none."""
    if not isinstance(message, dict):
        raise ValueError("the answer has no message")
    content, calls = message.get("content"), message.get("tool_calls") or []
    if not isinstance(content, str | None) or not isinstance(calls, list):
        raise ValueError("the answer's message is no text with calls")
    try:
        blocks = [_format_call(call["function"]["name"], call["function"]["arguments"]) for call in calls]
    except (KeyError, TypeError, RecursionError) as error:
        raise ValueError("the answer's calls are not those of functions") from error
    return "\n".join(filter(None, (content, *blocks)))


def _format_call(name: str, arguments: str | dict[str, Any]) -> str:
    if isinstance(arguments, str):
        arguments = json.loads(arguments or "{}")
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments}, ensure_ascii=False)}</tool_call>"


def _split(ids: Sequence[int]) -> Iterator[list[int]]:
    part: list[int] = []
    for token in ids:
        if token == END:
            if part:
                yield part
            part = []
        else:
            part.append(token)


def _describe_message(message: ChatMessage) -> dict[str, Any]:
    if message.images:
        raise ValueError("the conversation shows images, and this engine sends text")
    content = message.content if isinstance(message.content, str) else "".join(part.text for part in message.content)  # type: ignore[union-attr]
    described: dict[str, Any] = {"role": message.role, "content": content}
    if message.tool_calls:
        described["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": json.dumps(call.arguments)}}
            for call in message.tool_calls
        ]
    if message.tool_call_id:
        described["tool_call_id"] = message.tool_call_id
    return described


def _describe_tool(tool: ToolSpec) -> dict[str, Any]:
    return {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
