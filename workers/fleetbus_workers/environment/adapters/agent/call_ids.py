"""Calls as an agent sees them, and as the policy made them: their ids, and what the agent adds. Pure.

A template numbers the calls of a segment, and some models write ids of their own: either begins anew with each segment of an
episode, and clients drop a call, or execute it twice, whose id they have seen. So an agent gets ids that are unique among all
sessions, in the providers' form; in what it sends back the template's ids are put in their place. They follow from the
session's key and the number of the answer, so that a gateway that takes over gives the same ones.

Some agents fill in the defaults of a tool's schema before they send a call back, as Claude Code does for its tool
that edits: that says nothing new, and the call is the policy's as it was sampled
(docs/decisions/0242-defaults-that-are-filled-in-say-nothing.md).
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from fleetbus_schemas import ChatMessage, ToolCall, ToolSpec

PREFIX = "call_"
"""Of ids as OpenAI's interfaces give them."""

ANTHROPIC_PREFIX = "toolu_"
LENGTH = 24
_DIGITS = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"


class CallIds:
    """The ids of one session. ``key`` is the session's."""

    def __init__(self, key: str) -> None:
        self._key = key
        self._originals: dict[str, ToolCall] = {}

    def make(self, *parts: object) -> str:
        """`LENGTH` letters and digits that belong to these ``parts`` of this session."""
        named = ":".join(map(str, (self._key, *parts))).encode()
        value = int.from_bytes(hashlib.blake2b(named, digest_size=20).digest())
        digits = []
        for _ in range(LENGTH):
            value, digit = divmod(value, len(_DIGITS))
            digits.append(_DIGITS[digit])
        return "".join(digits)

    def show(self, calls: Sequence[ToolCall], answer: int) -> tuple[ToolCall, ...]:
        """The calls of an answer, by its number, as the agent gets them."""
        shown = []
        for index, call in enumerate(calls):
            made = self.make(answer, index)
            self._originals[made] = call
            shown.append(msgspec.structs.replace(call, id=f"{PREFIX}{made}"))
        return tuple(shown)

    def restore(self, messages: tuple[ChatMessage, ...], tools: Sequence[ToolSpec]) -> tuple[ChatMessage, ...]:
        """The messages of an agent with the template's ids, and its calls without the defaults of ``tools`` that it added; what
        was not given here stays."""
        if not self._originals:
            return messages
        defaults = {tool.name: read_defaults(tool.parameters) for tool in tools}
        return tuple(self._restore(message, defaults) for message in messages)

    def _restore(self, message: ChatMessage, defaults: Mapping[str, dict[str, Any]]) -> ChatMessage:
        if not message.tool_calls and not message.tool_call_id:
            return message
        calls = tuple(self._restore_call(call, defaults.get(call.name, {})) for call in message.tool_calls)
        original = self._find(message.tool_call_id)
        return msgspec.structs.replace(
            message, tool_calls=calls, tool_call_id=original.id if original else message.tool_call_id
        )

    def _restore_call(self, call: ToolCall, defaults: dict[str, Any]) -> ToolCall:
        original = self._find(call.id)
        if original is None:
            return call
        if call.name == original.name and adds_only(call.arguments, original.arguments, defaults):
            return original
        return msgspec.structs.replace(call, id=original.id)

    def _find(self, call_id: str) -> ToolCall | None:
        return self._originals.get(call_id.removeprefix(ANTHROPIC_PREFIX).removeprefix(PREFIX))


def read_defaults(schema: object) -> dict[str, Any]:
    """The values that a tool takes for arguments which a call leaves out."""
    properties = schema.get("properties") if isinstance(schema, dict) else None
    known = properties if isinstance(properties, dict) else {}
    return {name: each["default"] for name, each in known.items() if isinstance(each, dict) and "default" in each}


def adds_only(given: dict[str, Any], original: dict[str, Any], defaults: dict[str, Any]) -> bool:
    """True if ``given`` has more arguments than the ``original``, all of them ``defaults``, by what JSON distinguishes."""
    added = given.keys() - original.keys()
    if not added or not added <= defaults.keys():
        return False
    filled = original | {name: defaults[name] for name in added}
    return json.dumps(given, sort_keys=True) == json.dumps(filled, sort_keys=True)
