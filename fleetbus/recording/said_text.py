"""The text of a log entry as people search for it: what the policy was shown in a turn, and what it answered. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import msgspec

from fleetbus.bus.base import StreamEntry
from fleetbus.log.stored_entries import read_stored
from fleetbus_schemas import Action, ChatMessage, Observation, Subjects
from fleetbus_schemas.chat import Text, ToolCall

MAX_CHARACTERS = 32_768
"""Of one turn's text; what is beyond is not found."""

INSTRUCTIONS = ("system", "developer")
"""Messages of these roles are the same in every episode, and left out."""


class SaidText(NamedTuple):
    """The text of one entry: ``role`` is that of its last message."""

    sequence: int
    episode_id: str
    turn: int
    role: str
    text: str


def find_said_text(entry: StreamEntry) -> SaidText | None:
    """The text of an Observation or an Action; None for other entries, for what is only delivered again, and without text."""
    if entry.subject.split(".", 3)[2] not in ("obs", "act"):
        return None
    episode_id = entry.subject.rpartition(".")[2]
    match read_stored(entry):
        case Observation(hop=0) as shown:
            messages = [message for message in shown.messages if message.role not in INSTRUCTIONS]
            role, turn, parts = messages[-1].role if messages else "", shown.turn, _list_texts(messages)
        case Action() as answer:
            role, turn, parts = "assistant", answer.turn, iter((answer.text, *_list_calls(answer.tool_calls, answer.text)))
        case _:
            return None
    text = "\n".join(part for part in parts if part)[:MAX_CHARACTERS]
    return SaidText(entry.sequence, episode_id, turn, role, text) if text else None


def list_said_subjects(subjects: Subjects) -> list[str]:
    """Wildcards for every entry that has text."""
    return [subjects.observation("*", "*", "*"), subjects.action("*", "*")]


def _list_texts(messages: list[ChatMessage]) -> Iterator[str]:
    for message in messages:
        yield message.reasoning
        if isinstance(message.content, str):
            yield message.content
        else:
            yield from (part.text for part in message.content if isinstance(part, Text))
        yield from _list_calls(message.tool_calls, "")


def _list_calls(calls: tuple[ToolCall, ...], text: str) -> Iterator[str]:
    """The calls that are not in the text as they stand."""
    for call in calls:
        if not call.arguments_text or call.arguments_text not in text:
            yield f"{call.name} {call.arguments_text or msgspec.json.encode(call.arguments, enc_hook=repr).decode()}"
