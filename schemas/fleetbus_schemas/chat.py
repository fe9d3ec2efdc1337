"""Chat content: messages, tool calls, tool descriptions. Parts of messages, never published alone."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

Role = Literal["system", "user", "assistant", "tool"]


class Part(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """Base of the parts of a message that is more than text."""


class Text(Part, frozen=True, kw_only=True):
    """A run of text between images; if it is too long to travel, ``text`` is empty and ``object`` the SHA-256 (hex) of its
    UTF-8 bytes in the run's object bucket."""

    text: str
    object: str = ""


class Image(Part, frozen=True, kw_only=True):
    """An image by reference: ``object`` is the SHA-256 (hex) of its bytes in the run's object bucket."""

    object: str
    media_type: str = "image/png"
    width: int = 0
    height: int = 0


class ToolCall(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A call that the policy asked for, parsed from its text. ``id`` is what a result refers to it by, ``arguments_text`` its
    arguments as they stood there, before they were parsed; both empty where the protocol has none."""

    name: str
    arguments: dict[str, Any] = msgspec.field(default_factory=dict)
    id: str = ""
    arguments_text: str = ""


class ToolOutput(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The output of a called tool, unchanged: its ``text``, its ``structured`` data if it has any, ``failed`` if it says so."""

    text: str = ""
    structured: Any = None
    failed: bool = False


class ToolSpec(msgspec.Struct, frozen=True, omit_defaults=True):
    """A tool as the policy sees it, its fields by position or name; ``parameters`` is the JSON Schema of its arguments."""

    name: str
    description: str = ""
    parameters: dict[str, Any] = msgspec.field(default_factory=dict)


class ChatMessage(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One message of a conversation: plain text, or text and images in order.

    An assistant's message may have ``tool_calls`` and the ``reasoning`` before its text; a tool's is the result of the call
    ``tool_call_id``, of the tool ``name``.
    """

    role: Role
    content: str | tuple[Text | Image, ...] = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    name: str = ""
    reasoning: str = ""

    @property
    def images(self) -> tuple[Image, ...]:
        """The images in the content, in order."""
        return () if isinstance(self.content, str) else tuple(part for part in self.content if isinstance(part, Image))
