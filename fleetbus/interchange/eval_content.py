"""Messages of an Inspect log as those of a run's log. Images and other media are only named by their kind."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from fleetbus_schemas import ChatMessage, ToolCall

ATTACHMENT = "attachment://"
"""Before the hash of a long text, which stands once in a sample's ``attachments``."""


class Call(msgspec.Struct, kw_only=True):
    """A call of a tool."""

    id: str
    function: str
    arguments: dict[str, Any] = msgspec.field(default_factory=dict)


class Message(msgspec.Struct, kw_only=True):
    """A message of any role."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str | list[dict[str, Any]] = ""
    tool_calls: list[Call] | None = None
    tool_call_id: str | list[str] | None = None
    function: str | None = None
    metadata: dict[str, Any] | None = None


def read_message(message: Message, facts: Mapping[str, Any], attachments: Mapping[str, str]) -> ChatMessage:
    """A message that the policy did not sample."""
    call = message.tool_call_id if isinstance(message.tool_call_id, str) else ""
    name = facts.get("name")
    return ChatMessage(
        role=message.role,
        content=read_text_content(message.content, attachments),
        tool_calls=read_calls(message, {}) if message.role == "assistant" else (),
        tool_call_id=call if message.role == "tool" else "",
        name=(message.function or "") if message.role == "tool" else name if isinstance(name, str) else "",
    )


def read_calls(message: Message, facts: Mapping[str, Any]) -> tuple[ToolCall, ...]:
    """The calls of an assistant's message; an id that fleetbus made up is left out again."""
    calls, written = message.tool_calls or [], facts.get("calls")
    own = written if isinstance(written, list) and len(written) == len(calls) else [{}] * len(calls)
    return tuple(
        ToolCall(
            name=call.function,
            arguments=call.arguments,
            id=str(each.get("id", call.id)) if isinstance(each, dict) else call.id,
            arguments_text=str(each.get("arguments_text", "")) if isinstance(each, dict) else "",
        )
        for call, each in zip(calls, own, strict=True)
    )


def read_text_content(content: str | list[dict[str, Any]], attachments: Mapping[str, str]) -> str:
    """The text of a message without its reasoning; texts that stand apart are put in."""
    if isinstance(content, str):
        return resolve(content, attachments)
    return "\n".join(_read_part(part, attachments) for part in content if part.get("type") != "reasoning")


def resolve(text: str, attachments: Mapping[str, str]) -> str:
    """``text``, or the attachment that it names."""
    return attachments.get(text.removeprefix(ATTACHMENT), text) if text.startswith(ATTACHMENT) else text


def _read_part(part: Mapping[str, Any], attachments: Mapping[str, str]) -> str:
    text = part.get("text")
    return resolve(text, attachments) if isinstance(text, str) else f"[{part.get('type', 'part')}]"
