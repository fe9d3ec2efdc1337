"""Reads and writes OpenEnv's frames and bodies: actions, observations, errors by their names. Pure but for images.

An action is ``{"text": ...}`` (or ``{"message": ...}``), or a tool call as OpenEnv's MCP environments have it; its
``metadata.request_id`` names the logical step. An observation has ``text``, with ``<image>`` where each image stands, and
``messages`` as chat messages whose images are ``image_url`` parts with a ``data:`` URL: the bytes as the environment gave them.
"""

import base64
import json
from collections.abc import Sequence
from typing import Any

import anyio.to_thread

from fleetbus.bus.objects import ObjectMissing
from fleetbus.client.contexts import describe_context
from fleetbus_schemas import ChatMessage, Image, SessionAnswer, ToolCall, ToolSpec
from fleetbus_schemas.chat import Text
from fleetbus_workers.environment.normalization import to_plain_values
from fleetbus_workers.gateway.images import PLACEHOLDER, LoadImage
from fleetbus_workers.serving.bounded_json import check_values

MAX_ID_CHARACTERS = 255
INLINE_BYTES = 64 << 10
"""Larger images are encoded in a thread."""

CALL_FIELDS = {"type", "tool_name", "arguments", "metadata"}
TEXT_FIELDS = {"type", "text", "message", "metadata"}

_write = json.JSONEncoder(allow_nan=False).encode


class FrameError(Exception):
    """An error that leaves the session as it is. ``code`` is the protocol's, ``status`` the same over HTTP."""

    def __init__(self, code: str, message: str, *, status: int = 0, **details: Any) -> None:
        super().__init__(message)
        self.code = code
        self.status = status or (422 if code == "VALIDATION_ERROR" else 500)
        self.details = details


def read_frame(text: str | None) -> tuple[str, Any]:
    """Type and data of a frame."""
    if text is None:
        raise FrameError("INVALID_JSON", "frames are text")
    try:
        check_values(text)
        frame = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise FrameError("INVALID_JSON", f"Invalid JSON: {error}") from error
    if not isinstance(frame, dict):
        raise FrameError("VALIDATION_ERROR", "a frame is an object")
    if unknown := set(frame) - {"type", "data"}:
        raise FrameError("VALIDATION_ERROR", f"a frame has a type and data, not {', '.join(sorted(unknown))}")
    return str(frame.get("type", "")), frame.get("data")


def write_json(value: Any) -> str:
    """JSON in ASCII; what JSON cannot say is spelled."""
    try:
        return _write(value)
    except ValueError:
        return _write(to_plain_values(value))


def read_object(data: Any) -> dict[str, object]:
    if not isinstance(data, dict):
        raise FrameError("VALIDATION_ERROR", "data must be an object")
    return data


def read_action(data: dict[str, object]) -> tuple[str, tuple[ToolCall, ...]]:
    """The text of an action, or its tool call. What else it has is refused by name: it would reach nobody."""
    is_call = data.get("type") == "call_tool"
    if unknown := sorted(set(data) - (CALL_FIELDS if is_call else TEXT_FIELDS)):
        raise FrameError("VALIDATION_ERROR", f"an action here has a text, or is a call_tool; it has no {', '.join(unknown)}")
    if is_call:
        name, arguments = data.get("tool_name"), data.get("arguments") or {}
        if not isinstance(name, str) or not isinstance(arguments, dict):
            raise FrameError("VALIDATION_ERROR", "a tool call has a tool_name and an object of arguments")
        return "", (ToolCall(name=name, arguments=arguments),)
    if str(data.get("type", "text")) not in TEXT_FIELDS:
        raise FrameError("VALIDATION_ERROR", f"an action here has a text, or is a call_tool, and not a {data['type']}")
    if "text" in data and "message" in data:
        raise FrameError("VALIDATION_ERROR", "an action has a text or a message, and not both")
    text = data.get("text", data.get("message"))
    if not isinstance(text, str):
        raise FrameError("VALIDATION_ERROR", "an action has a text, or is a call_tool")
    return text, ()


def read_request_id(data: dict[str, Any]) -> str:
    """The client's name of this step, by which a repetition is recognised; empty if it gives none."""
    metadata = data.get("metadata")
    return read_id(metadata.get("request_id")) if isinstance(metadata, dict) else ""


def read_id(value: Any) -> str:
    """An id of the client's own making."""
    if value is None:
        return ""
    if not isinstance(value, str) or len(value) > MAX_ID_CHARACTERS:
        raise FrameError("VALIDATION_ERROR", f"an id is a text of at most {MAX_ID_CHARACTERS} characters")
    return value


def read_seed(value: object) -> int | None:
    if value is None or (isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63):
        return value
    raise FrameError("VALIDATION_ERROR", "seed must be a whole number of 0 or more, below 2**63")


async def write_observation(answer: SessionAnswer, load: LoadImage | None, *, tool: str = "") -> dict[str, object]:
    """``observation`` and ``metadata``; ``load`` None: placeholders for images. ``tool``: the one that was called, whose
    result then stands where OpenEnv's MCP clients look for it. What was said for a policy alone is left out. Raises
    `FrameError` for an image that is gone."""
    shown = select_environment_messages(answer)
    try:
        messages = [{"role": message.role, "content": await _render_content(message, load)} for message in shown]
    except ObjectMissing as gone:
        raise FrameError("EXECUTION_ERROR", str(gone)) from gone
    texts = [_render_text(message, load) for message in shown if message.role != "system"]
    observation: dict[str, Any] = {"text": "\n".join(texts), "messages": messages}
    if tool:
        content = [block for message in messages for block in _convert_to_mcp_blocks(message["content"])]
        failed = answer.output.failed if answer.output else answer.tool_errors > 0
        structured = answer.output.structured if answer.output else None
        result = {"content": content, "data": _data(structured, observation["text"]), "is_error": False}
        if structured is not None:
            result["structured_content"] = structured
        error = {"error_type": "execution_error", "message": observation["text"]} if failed else None
        observation |= {"tool_name": tool, "result": None if failed else result, "error": error}
    metadata = answer.state | ({"truncated": True} if answer.truncated else {}) | describe_context(answer.context)
    return {"observation": observation | {"metadata": metadata}} | ({"metadata": metadata} if metadata else {})


def select_environment_messages(answer: SessionAnswer) -> tuple[ChatMessage, ...]:
    """The environment's messages, without what was made for a policy: its prompt of tools, the words around their results."""
    messages = answer.messages[answer.prompted :]
    if answer.output is None:
        return messages
    images = [part for message in messages if not isinstance(message.content, str) for part in message.content]
    pictures = [part for part in images if isinstance(part, Image)]
    text = answer.output.text
    return (ChatMessage(role="user", content=(Text(text=text), *pictures) if pictures else text),)


def _data(structured: object, text: str) -> object:
    """A result as OpenEnv's clients return it: a single value that was wrapped into an object comes out of it."""
    if structured is None:
        return text
    return structured["result"] if isinstance(structured, dict) and set(structured) == {"result"} else structured


def describe_tools(tools: Sequence[ToolSpec], *, schema: str = "input_schema") -> list[dict[str, object]]:
    return [{"name": tool.name, "description": tool.description, schema: tool.parameters} for tool in tools]


def _render_text(message: ChatMessage, load: LoadImage | None) -> str:
    if isinstance(message.content, str):
        return message.content
    return "".join(
        part.text if isinstance(part, Text) else PLACEHOLDER if load else _describe_image(part) for part in message.content
    )


async def _render_content(message: ChatMessage, load: LoadImage | None) -> str | list[dict[str, object]]:
    if isinstance(message.content, str) or load is None:
        return _render_text(message, load)
    return [
        {"type": "text", "text": part.text}
        if isinstance(part, Text)
        else {"type": "image_url", "image_url": {"url": await _encode_data_url(part, await load(part))}}
        for part in message.content
    ]


def _convert_to_mcp_blocks(content: Any) -> list[dict[str, object]]:
    """Chat content as MCP content."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    return [part if part["type"] == "text" else _build_image_block(part["image_url"]["url"]) for part in content]


def _build_image_block(url: str) -> dict[str, object]:
    kind, _, data = url.partition(";base64,")
    return {"type": "image", "data": data, "mimeType": kind.removeprefix("data:")}


async def _encode_data_url(image: Image, data: bytes) -> str:
    encode = base64.b64encode
    encoded = encode(data) if len(data) <= INLINE_BYTES else await anyio.to_thread.run_sync(encode, data)
    return f"data:{image.media_type};base64,{encoded.decode()}"


def _describe_image(image: Image) -> str:
    return f"[image, {image.width}x{image.height}]"
