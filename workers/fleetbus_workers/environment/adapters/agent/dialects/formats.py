"""Formats that a call wants of its answer - JSON, a schema, a forced tool - told to the policy instead of forced on it. Pure.

Nothing limits what is sampled, so that what is trained is the distribution that was sampled from; whether an answer keeps the
format is the policy's doing, and learned. See docs/decisions/0208. Above: the protocols, each of which reads its own fields.
"""

import json
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from fleetbus_schemas import ChatMessage, ToolCall

PREFIX = "The format of your answer: "
"""The start of the system message that tells it, by which it is known."""


class Format(msgspec.Struct, frozen=True, kw_only=True):
    """One wish for an answer. ``field``: the call's own name for it; ``told``: what the policy reads. ``is_json``: the text has
    to be JSON, an object with the ``keys`` if there are some; ``calls``: it has to call one of these tools."""

    field: str
    told: str
    is_json: bool = False
    keys: tuple[str, ...] = ()
    calls: tuple[str, ...] = ()


def read_json_format(field: str, schema: object = None) -> Format:
    """JSON of a schema, or any object where there is none."""
    if not isinstance(schema, dict) or not schema:
        return Format(field=field, told="one JSON object and nothing else.", is_json=True)
    required = schema.get("required")
    keys = tuple(key for key in required if isinstance(key, str)) if isinstance(required, list) else ()
    written = json.dumps(schema, sort_keys=True, ensure_ascii=False)
    return Format(field=field, told=f"JSON of this schema and nothing else. {written}", is_json=True, keys=keys)


def read_choice(field: str, names: Sequence[str], *, forced: bool, is_all: bool = False) -> Format:
    """Calls of these tools alone, at least one of them if ``forced``; ``is_all``: they are all that are offered."""
    listed = "the tools" if is_all and len(names) > 1 else ", ".join(names)
    if forced:
        return Format(field=field, told=f"a call of {'one of ' if len(names) > 1 else ''}{listed}.", calls=tuple(names))
    return Format(field=field, told=f"no call of another tool than {listed}.")


def tell_formats(messages: Sequence[ChatMessage], formats: Sequence[Format]) -> tuple[ChatMessage, ...]:
    """The conversation with a system message that tells the formats, after those that it begins with: there it stays the same
    in the next call, which continues this one then."""
    if not formats:
        return tuple(messages)
    first = next((number for number, message in enumerate(messages) if message.role != "system"), len(messages))
    told = ChatMessage(role="system", content=PREFIX + " ".join(each.told for each in formats))
    return (*messages[:first], told, *messages[first:])


def tells_format(message: ChatMessage) -> bool:
    """True for a message that `tell_formats` added."""
    return message.role == "system" and isinstance(message.content, str) and message.content.startswith(PREFIX)


def find_unkept(formats: Sequence[Format], text: str, calls: Sequence[ToolCall]) -> Iterator[str]:
    """The formats that an answer does not keep, in words. Of a schema the required keys are looked at, not the values."""
    for each in formats:
        if each.calls and not any(call.name in each.calls for call in calls):
            yield f"no call of {', '.join(each.calls)}, which {each.field} asks for"
        elif each.is_json and not calls and (fault := _find_fault(text, each.keys)):
            yield f"{fault}, which {each.field} asks for"


def _find_fault(text: str, keys: Sequence[str]) -> str:
    try:
        value: Any = json.loads(text)
    except (ValueError, RecursionError):
        return "no JSON"
    missing = [key for key in keys if not isinstance(value, dict) or key not in value]
    return f"no {', '.join(missing)} in the JSON" if missing else ""
