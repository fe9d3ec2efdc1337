"""Conversations as strict chat templates take them: what such a template refuses, merged as providers of such models do. Pure.

Mistral's templates refuse two system messages, two of the user's in a row, a system message after the user's, and words of the
user's right after results of tools. Agents send all of these. Nothing is left out and nothing changes its place; only a
template that refused a conversation as it is gets it merged. See docs/decisions/0190.
"""

from collections.abc import Iterator, Sequence
from itertools import groupby, takewhile
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
    for role, group in groupby(messages, key=lambda message: message["role"]):
        neighbours = list(group)
        joined += [join_contents(*neighbours)] if role in JOINED else neighbours
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


def join_contents(first: Message, *others: Message) -> Message:
    """The first message with the contents of the others at its end; parts, where images are shown, stay parts."""
    if not others:
        return first
    contents = [message["content"] for message in (first, *others)]
    texts = list(takewhile(lambda content: isinstance(content, str), contents))
    text, rest = BETWEEN.join(texts), contents[len(texts) :]
    if not rest:
        return first | {"content": text}
    parts = [_make_part(f"{text}{BETWEEN}"), *rest[0]] if texts else [*rest[0]]
    for content in rest[1:]:
        parts += [_make_part(BETWEEN), *([_make_part(content)] if isinstance(content, str) else content)]
    return first | {"content": parts}


def _make_part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}
