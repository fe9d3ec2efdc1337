"""Ids as an agent sees them, and as the policy's template has them. Pure.

A template numbers the calls of a segment, and some models write ids of their own: either begins anew with each segment of an
episode, and clients drop a call, or execute it twice, whose id they have seen. So an agent gets ids that are unique among all
sessions, in the providers' form; in what it sends back the template's ids are put in their place. They follow from the
session's key and the number of the answer, so that a gateway that takes over gives the same ones.
"""

import hashlib
from collections.abc import Sequence

import msgspec

from fleetbus_schemas import ChatMessage, ToolCall

PREFIX = "call_"
"""Of ids as OpenAI's interfaces give them."""

ANTHROPIC_PREFIX = "toolu_"
LENGTH = 24
_DIGITS = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"


class CallIds:
    """The ids of one session. ``key`` is the session's."""

    def __init__(self, key: str) -> None:
        self._key = key
        self._originals: dict[str, str] = {}

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
            self._originals[made] = call.id
            shown.append(msgspec.structs.replace(call, id=f"{PREFIX}{made}"))
        return tuple(shown)

    def restore(self, messages: tuple[ChatMessage, ...]) -> tuple[ChatMessage, ...]:
        """The messages of an agent with the template's ids; ids that were not given here stay."""
        return tuple(map(self._restore, messages)) if self._originals else messages

    def _restore(self, message: ChatMessage) -> ChatMessage:
        if not message.tool_calls and not message.tool_call_id:
            return message
        calls = tuple(msgspec.structs.replace(call, id=self._find(call.id)) for call in message.tool_calls)
        return msgspec.structs.replace(message, tool_calls=calls, tool_call_id=self._find(message.tool_call_id))

    def _find(self, call_id: str) -> str:
        return self._originals.get(call_id.removeprefix(ANTHROPIC_PREFIX).removeprefix(PREFIX), call_id)
