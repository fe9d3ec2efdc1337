"""Conversations as strict chat templates take them: what such a template refuses, merged as providers of such models do. Pure.

Mistral's templates refuse two system messages, two of the user's in a row, a system message after the user's, and words of the
user's right after results of tools. Agents send all of these. Nothing is left out and nothing changes its place; only a
template that refused a conversation as it is gets it merged. See docs/decisions/0190.
"""

from collections.abc import Iterator, Sequence
from typing import Any

Message = dict[str, Any]
BETWEEN = "\n\n"
JOINED = ("system", "user")


def list_merges(messages: Sequence[Message]) -> Iterator[list[Message]]:
    """The conversation in ways that change more and more of it, each other than the one before."""
    before = list(messages)
    for merge in (_join_neighbours, _address_late_instructions, _append_to_results):
        merged = merge(before)
        if merged != before:
            yield merged
        before = merged


def _join_neighbours(messages: Sequence[Message]) -> list[Message]:
    """Neighbouring system messages as one, and the user's."""
    joined: list[Message] = []
    for message in messages:
        if joined and message["role"] in JOINED and message["role"] == joined[-1]["role"]:
            joined[-1] = join_contents(joined[-1], message)
        else:
            joined.append(message)
    return joined


def _address_late_instructions(messages: Sequence[Message]) -> list[Message]:
    """System messages after the first message as the user's."""
    late = [message | {"role": "user"} if message["role"] == "system" else message for message in messages[1:]]
    return _join_neighbours([*messages[:1], *late])


def _append_to_results(messages: Sequence[Message]) -> list[Message]:
    """The user's words right after a tool's result as the end of that result."""
    appended: list[Message] = []
    for message in messages:
        if appended and (appended[-1]["role"], message["role"]) == ("tool", "user"):
            appended[-1] = join_contents(appended[-1], message)
        else:
            appended.append(message)
    return appended


def join_contents(first: Message, second: Message) -> Message:
    """The first message with the content of the second at its end; parts, where images are shown, stay parts."""
    one, other = first["content"], second["content"]
    if isinstance(one, str) and isinstance(other, str):
        return first | {"content": f"{one}{BETWEEN}{other}"}
    parts = [_make_part(f"{one}{BETWEEN}")] if isinstance(one, str) else [*one, _make_part(BETWEEN)]
    return first | {"content": [*parts, *([_make_part(other)] if isinstance(other, str) else other)]}


def _make_part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}
