"""Normalizes what an environment returns for a message: plain numbers and values, bounded text. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from fleetbus_schemas import ChatMessage, Image, Text

_NOT_FINITE = {math.inf: "Infinity", -math.inf: "-Infinity"}

INFO_BYTES = 2048
"""Limits of what an environment returns beside its observation, in results: these are stored as long as the log, and read by
many."""

CLIP_NOTICE = "\n[cut: {left} more bytes]"


def to_plain_number(value: float) -> float:
    """A number of any library as a plain one; raises `TypeError` for numeric text."""
    math.isfinite(value)
    return float(value)


MAX_LEVELS = 64
TOO_DEEP = f"[more than {MAX_LEVELS} levels]"
"""What stands for data that is nested deeper: a reader with less stack left than the writer had could not decode it."""


def to_plain_values(value: Any, levels: int = MAX_LEVELS) -> Any:
    """JSON-like data of any library as plain values: arrays become lists, other objects text; so do NaN and infinities, which
    JSON cannot represent, written as in protobuf's JSON does. What lies below ``levels`` becomes a notice."""
    if isinstance(value, Mapping):
        return {str(key): to_plain_values(item, levels - 1) for key, item in value.items()} if levels else TOO_DEEP
    if isinstance(value, (list, tuple, set, frozenset)):
        return [to_plain_values(item, levels - 1) for item in value] if levels else TOO_DEEP
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if hasattr(value, "tolist"):
        return to_plain_values(value.tolist(), levels)
    if isinstance(value, float):
        return value if math.isfinite(value) else _NOT_FINITE.get(value, "NaN")
    return str(value)


def clip_values(values: Mapping[str, Any], limit: int) -> dict[str, Any]:
    """The plain values of ``values`` (`to_plain_values`) without the entries that do not fit into ``limit`` bytes, the largest
    first, and those that cannot travel."""
    sizes: dict[str, int] = {}
    plain: dict[str, Any] = {}
    for key, value in values.items():
        try:
            name = str(key)
            plain[name] = to_plain_values(value)
            sizes[name] = len(msgspec.msgpack.encode((name, plain[name])))
        except Exception:  # noqa: BLE001 - numbers over 64 bits, text without bytes, objects of others that fail to describe themselves
            continue
    total = sum(sizes.values())
    for name in sorted(sizes, key=lambda name: sizes[name], reverse=True):
        if total <= limit:
            break
        total -= sizes.pop(name)
    return {name: plain[name] for name in plain if name in sizes}


def format_text(messages: Sequence[ChatMessage]) -> str:
    """The text of messages, with a word for each image."""
    texts = []
    for message in messages:
        parts = (Text(text=message.content),) if isinstance(message.content, str) else message.content
        texts.append("".join(part.text if isinstance(part, Text) else f"[image, {part.width}x{part.height}]" for part in parts))
    return "\n".join(texts)


def clip_text(text: str, limit: int) -> str:
    """Text beyond ``limit`` bytes is cut, and says so."""
    data = text.encode("utf-8", "replace")
    if len(data) <= limit:
        return text
    head = data[:limit].decode("utf-8", "ignore")
    return head + CLIP_NOTICE.format(left=len(data) - len(head.encode()))


def clip_messages(messages: Sequence[ChatMessage], limit: int, whole: int = 0) -> tuple[ChatMessage, ...]:
    """Text beyond ``limit`` bytes per message is cut, with a notice; not that of the first ``whole`` messages."""
    return (*messages[:whole], *(_clip(message, limit) for message in messages[whole:]))


def _clip(message: ChatMessage, limit: int) -> ChatMessage:
    if isinstance(message.content, str):
        text = clip_text(message.content, limit)
        return message if text is message.content else msgspec.structs.replace(message, content=text)
    parts: list[Text | Image] = []
    for part in message.content:
        if isinstance(part, Text):
            part = Text(text=clip_text(part.text, limit))
            limit = max(limit - len(part.text.encode("utf-8", "replace")), 0)
        parts.append(part)
    return msgspec.structs.replace(message, content=tuple(parts))
