"""The wire of the Open Reward Standard: events of a stream, JSON documents and their values, read from servers that may be bad.

Read after the source of ``ors-sdk`` 0.1.0 and ``openreward`` 0.1.167. Above it is `client`.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterable, AsyncIterator
from typing import Any, TypeVar

import msgspec

from fleetbus_workers.environment.base import EnvironmentFailed
from fleetbus_workers.environment.failure_location import clean_error
from fleetbus_workers.serving.bounded_json import check_values

MAX_ANSWER_BYTES = 32 << 20
"""Of one answer, all events of a stream together."""

T = TypeVar("T")


class BadAnswer(EnvironmentFailed):
    """An answer that is not of the standard, or too large to be read."""


class Block(msgspec.Struct, frozen=True):
    """A part of a prompt or an output: ``type`` is ``text`` or ``image``, whose ``data`` is base64."""

    type: str = "text"
    text: str = ""
    data: str = ""
    mimeType: str = ""


class Output(msgspec.Struct, frozen=True):
    """The output of a call that ran. ``reward`` may be absent, and NaN where a server writes that into JSON."""

    blocks: tuple[Block, ...] = ()
    reward: float | None = None
    finished: bool = False
    metadata: dict[str, Any] | None = None


class CallResult(msgspec.Struct, frozen=True):
    """A call's result: an output, or the reason why the call did not run."""

    ok: bool
    output: Output = Output()
    error: str = ""
    reason: str | None = None


class Tool(msgspec.Struct, frozen=True):
    """A tool as the server describes it; ``input_schema`` is a JSON Schema."""

    name: str
    description: str | None = None
    input_schema: dict[str, Any] | None = None


class TerminalTool(msgspec.Struct, frozen=True):
    """The tool that takes the policy's last message as ``arg``, if it takes any; the policy does not see it."""

    name: str
    arg: str | None = None


class Listing(msgspec.Struct, frozen=True):
    """The tools of a session."""

    tools: tuple[Tool, ...] = ()
    terminal_tool: TerminalTool | None = None


class Split(msgspec.Struct, frozen=True):
    """A part of an environment's tasks; ``type`` is ``train``, ``validation`` or ``test``."""

    name: str
    type: str = ""


class TaskCount(msgspec.Struct, frozen=True):
    """The number of tasks in a split."""

    num_tasks: int


def decode_answer(content: bytes, kind: type[T], secret: str = "") -> T:
    """A JSON document as ``kind``, with NaN as servers in Python write it; ``secret`` is blanked, unpaired surrogates are
    replaced. Raises `BadAnswer`. Takes time in proportion to ``content``: larger ones belong in a thread."""
    if secret:
        content = content.replace(secret.encode(), b"[redacted]")
    try:
        check_values(content)
        value = json.loads(content)
        if b"\\ud" in content.lower():
            value = json.loads(json.dumps(value, ensure_ascii=False).encode("utf-8", "replace"))
        return msgspec.convert(value, kind)
    except (ValueError, RecursionError) as error:  # msgspec's errors are ValueErrors
        raise BadAnswer(f"the server's answer cannot be read: {clean_error(str(error))}") from error


def read_detail(content: bytes) -> str:
    """The words of an error that came with a status, without secrets and of bounded length."""
    text = content[: 1 << 16].decode("utf-8", "replace").strip()
    try:
        detail = json.loads(text)["detail"]
        text = detail if isinstance(detail, str) else json.dumps(detail)
    except (ValueError, LookupError, TypeError, RecursionError):
        pass
    return clean_error(text)


async def read_events(chunks: AsyncIterable[bytes]) -> AsyncIterator[tuple[str, bytes]]:
    """Name and data of each event of a stream that has one; an event without its end is none. Raises `BadAnswer` beyond
    `MAX_ANSWER_BYTES`. Lines end with LF or CRLF alone: JSON may hold what Python calls line ends."""
    name, data, held, size = "", bytearray(), bytearray(), 0
    async for chunk in chunks:
        size += len(chunk)
        if size > MAX_ANSWER_BYTES:
            raise BadAnswer(f"the server's answer has more than {MAX_ANSWER_BYTES} bytes")
        *ended, rest = chunk.split(b"\n")
        for piece in ended:
            line = bytes(held + piece).removesuffix(b"\r")
            held.clear()
            field, _, value = line.partition(b":")
            value = value.removeprefix(b" ")
            if not line:
                if name:
                    yield name, bytes(data)
                name = ""
                data.clear()
            elif field == b"event":
                name = value.decode("utf-8", "replace")
            elif field == b"data":
                data += (b"\n" if data else b"") + value
        held += rest
