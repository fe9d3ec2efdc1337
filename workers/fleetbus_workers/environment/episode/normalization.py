"""What an environment returns, normalized for a message: types checked, plain numbers, bounded text. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from fleetbus_schemas import ChatMessage

_NOT_FINITE = {math.inf: "Infinity", -math.inf: "-Infinity"}

CLIP_NOTICE = "\n[cut: {left} more bytes]"


def check_messages(messages: Sequence[ChatMessage]) -> tuple[ChatMessage, ...]:
    """The messages of an environment; raises `TypeError` when they are something else."""
    if not all(isinstance(message, ChatMessage) for message in messages):
        raise TypeError("an environment's messages must be of the type ChatMessage")
    return tuple(messages)


def to_plain_number(value: float) -> float:
    """A number of any library as a plain one; raises `TypeError` for numeric text."""
    math.isfinite(value)
    return float(value)


def to_plain_values(value: Any) -> Any:
    """JSON-like data of any library as plain values: arrays become lists, other objects text; so do NaN and infinities, which
    JSON cannot represent, written as in protobuf's JSON does."""
    if isinstance(value, Mapping):
        return {str(key): to_plain_values(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [to_plain_values(item) for item in value]
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if hasattr(value, "tolist"):
        return to_plain_values(value.tolist())
    if isinstance(value, float):
        return value if math.isfinite(value) else _NOT_FINITE.get(value, "NaN")
    return str(value)


def clip_messages(messages: Sequence[ChatMessage], limit: int) -> tuple[ChatMessage, ...]:
    """Text beyond ``limit`` bytes per message is cut, with a notice."""
    return tuple(_clip(message, limit) for message in messages)


def _clip(message: ChatMessage, limit: int) -> ChatMessage:
    if not isinstance(message.content, str):
        return message
    data = message.content.encode("utf-8", "replace")
    if len(data) <= limit:
        return message
    head = data[:limit].decode("utf-8", "ignore")
    return msgspec.structs.replace(message, content=head + CLIP_NOTICE.format(left=len(data) - len(head.encode())))
