"""Worked conversations that the policy reads before each task: few-shot examples for any environment, from one JSON file.

Above it are environment workers and the checks before a run; below it are messages alone.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from fleetbus.errors import UserError
from fleetbus_schemas import ChatMessage
from fleetbus_schemas.message import UNREADABLE

MAX_BYTES = 1 << 18
"""Of an examples file: more than any context takes."""

_INSTRUCTIONS = ("system", "developer")


def read_examples(path: str) -> tuple[ChatMessage, ...]:
    """The messages of a JSON file, ``[{"role": "user", "content": "..."}, {"role": "assistant", ...}, ...]``; none for no path.
    Raises `UserError`."""
    if not path:
        return ()
    try:
        with Path(path).expanduser().open("rb") as file:
            content = file.read(MAX_BYTES + 1)
        if len(content) > MAX_BYTES:
            raise UserError(f"environment.examples = {path}: over {MAX_BYTES} bytes")
        messages = msgspec.json.decode(content, type=tuple[ChatMessage, ...])
    except (OSError, *UNREADABLE) as error:
        raise UserError(
            f"environment.examples = {path}: {error}; write a JSON list of messages with role and content"
        ) from error
    _check(path, messages)
    return messages


def insert_examples(messages: tuple[ChatMessage, ...], examples: tuple[ChatMessage, ...]) -> tuple[ChatMessage, ...]:
    """The messages that begin an episode, with the examples between its instructions and its task."""
    count = next((index for index, message in enumerate(messages) if message.role not in _INSTRUCTIONS), len(messages))
    return (*messages[:count], *examples, *messages[count:])


def _check(path: str, messages: tuple[ChatMessage, ...]) -> None:
    fault = ""
    if not messages:
        fault = "no messages"
    elif any(message.role in _INSTRUCTIONS for message in messages):
        fault = "the environment writes the instructions: leave out messages of role system"
    elif messages[-1].role != "assistant":
        fault = "the last message must be an answer of the assistant"
    elif any(message.images for message in messages):
        fault = "examples are text"
    if fault:
        raise UserError(f"environment.examples = {path}: {fault}")
