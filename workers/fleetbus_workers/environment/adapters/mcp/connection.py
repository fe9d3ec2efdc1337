"""One episode's connection to an MCP server: the protocol, and the connection to a server object in this very process.

Above it is `McpEnvironment`; below it the SDK's server. `DirectConnection` hands each request to the server's own request
pipeline inside the task that asked. It has no task and no stream of its own, so cancelling a call cancels the tool, there is
nothing to leave behind, and an episode costs half of what it costs over the SDK's in-memory transport.
"""

import base64
import json
import math
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any, Protocol, TypeVar

import anyio
import msgspec
import structlog
from mcp.server import Server
from mcp.server.lowlevel.server import lifespan as default_lifespan
from mcp.server.runner import modern_on_request
from mcp.shared.dispatcher import CallOptions
from mcp.shared.exceptions import MCPError, NoBackChannelError
from mcp.shared.message import MessageMetadata
from mcp.shared.transport_context import TransportContext
from mcp_types import CLIENT_CAPABILITIES_META_KEY, CLIENT_INFO_META_KEY, PROTOCOL_VERSION_META_KEY, RequestId
from mcp_types.version import LATEST_MODERN_VERSION
from pydantic import ValidationError

from fleetbus.core.text.prompts import find_result_error, truncate_text
from fleetbus_schemas import ToolOutput, ToolSpec
from fleetbus_workers.environment.base import EnvironmentFailed
from fleetbus_workers.environment.images.observation import EncodedImage
from fleetbus_workers.environment.normalization import to_plain_values
from fleetbus_workers.images.image_formats import find_media_type

MAX_TOOL_PAGES = 100
"""Most pages of a tool listing that are read: bounds a listing that never ends."""

MAX_TOOLS = 2048
"""Of one server: more do not fit into a prompt, and every call looks its tool up among them."""

MAX_IMAGES = 16
MAX_IMAGE_BYTES = 8 << 20
"""Of one call: further and larger images are words in its text."""

T = TypeVar("T")

_log = structlog.get_logger(__name__)


class ToolResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a call: text, or JSON-like data where a server sent no text; ``failed`` if the tool says that it failed.

    ``abandoned``: how the call ended is unknown. ``images`` are those among its blocks, in order. ``ends``: the call was the
    policy's last, with its final ``answer`` if it gave one. ``structured``: the data that came beside its blocks.
    """

    content: Any
    failed: bool = False
    abandoned: bool = False
    images: tuple[EncodedImage, ...] = ()
    ends: bool = False
    answer: str | None = None
    structured: Any = None


class ServerGone(EnvironmentFailed):
    """The server died, hangs, or is no longer the one that the episode began with."""


def build_timeout_result(seconds: float) -> ToolResult:
    """The result of a call that was abandoned. It is never repeated: its effect is unknown."""
    text = f"the call took longer than {seconds:g} s and was abandoned; it may still have had its effect"
    return ToolResult(content=text, failed=True, abandoned=True)


class Connection(Protocol):
    """One connection, used by one call at a time. `close` may follow a failed or cancelled `open`, and may be repeated."""

    async def open(self) -> None: ...

    async def list_tools(self) -> tuple[ToolSpec, ...]: ...

    async def call_tool(self, name: str, arguments: dict[str, object]) -> ToolResult:
        """Raises `ServerGone` when the server is; all else that goes wrong with a call is its result."""

    async def query(self, sql: str, params: Sequence[Any]) -> object:
        """Rows from the database behind the server, for verifiers; raises `LookupError` if it shows none."""

    async def close(self) -> None: ...


class DirectConnection:
    """A connection to a server object. It must have the SDK's default lifespan: another one may hold tasks of its own.

    ``listings`` is shared by the connections of one factory; a server class that declares ``tools_are_fixed`` is asked once.
    A call is cancelled after ``call_seconds``.
    """

    def __init__(
        self,
        server: Server[Any],
        listings: dict[type[Server[object]], tuple[ToolSpec, ...]],
        *,
        call_seconds: float = math.inf,
    ) -> None:
        self._server = server
        self._call_seconds = call_seconds
        self._listings = listings
        self._handle = modern_on_request(server, {})

    async def open(self) -> None:
        await anyio.lowlevel.checkpoint()

    async def list_tools(self) -> tuple[ToolSpec, ...]:
        if not getattr(self._server, "tools_are_fixed", False):
            return await self._list_tools()
        kind = type(self._server)
        if kind not in self._listings:
            self._listings[kind] = await self._list_tools()
        return self._listings[kind]

    async def _list_tools(self) -> tuple[ToolSpec, ...]:
        tools: list[ToolSpec] = []
        cursor: str | None = None
        for _ in range(MAX_TOOL_PAGES):
            params = {} if cursor is None else {"cursor": cursor}
            page = await self._handle(_RequestContext(), "tools/list", params | _ENVELOPE)
            tools += [parse_tool_spec(tool) for tool in check_count(tools, page.get("tools", ()))]
            cursor = page.get("nextCursor")
            if cursor is None:
                break
        return tuple(tools)

    async def call_tool(self, name: str, arguments: dict[str, object]) -> ToolResult:
        with anyio.move_on_after(self._call_seconds):
            return await self._call_tool(name, arguments)
        return build_timeout_result(self._call_seconds)

    async def _call_tool(self, name: str, arguments: dict[str, object]) -> ToolResult:
        params = {"name": name, "arguments": arguments, **_ENVELOPE}
        try:
            return parse_tool_result(await self._handle(_RequestContext(), "tools/call", params))
        except MCPError as error:
            return ToolResult(content=error.error.message, failed=True)
        except ValidationError:
            return ToolResult(content="invalid request", failed=True)
        except Exception as error:  # noqa: BLE001 - a handler that raises is a tool that failed: what the SDK makes of it on a wire
            _log.warning("tool raised an exception; returning an error to the policy", tool=name, error=repr(error))
            return ToolResult(content=f"the tool failed ({type(error).__name__})", failed=True)

    async def query(self, sql: str, params: Sequence[Any]) -> object:
        query = getattr(self._server, "query", None)
        if query is None:
            raise LookupError("this environment has no database")
        return query(sql, params)

    async def close(self) -> None:
        close = getattr(self._server, "close", None)
        if close is not None:
            close()


def check_count(tools: Sequence[ToolSpec], page: Sequence[T]) -> Sequence[T]:
    """Another page of a listing; raises `EnvironmentFailed` if they become too many."""
    if len(tools) + len(page) > MAX_TOOLS:
        raise EnvironmentFailed(f"the MCP server lists more than {MAX_TOOLS} tools")
    return page


def has_default_lifespan(server: object) -> bool:
    """True if ``server`` is a low-level server that holds nothing of its own for as long as it is connected."""
    return isinstance(server, Server) and server.lifespan is default_lifespan


def parse_tool_spec(tool: Mapping[str, Any]) -> ToolSpec:
    """A tool as the wire describes it."""
    return ToolSpec(
        name=tool["name"], description=tool.get("description") or "", parameters=dict(tool.get("inputSchema") or {})
    )


def parse_tool_result(result: Mapping[str, Any]) -> ToolResult:
    """A call's result as the wire carries it: its texts, a placeholder for each other block, or the structured content."""
    parts = [_format_block(block) for block in result.get("content", ())]
    content: object = "\n".join(parts) if parts else result.get("structuredContent")
    failed = bool(result.get("isError")) or find_result_error(content) is not None
    images = _decode_images(result.get("content", ()))
    return ToolResult(content=content, failed=failed, images=images, structured=result.get("structuredContent"))


def tool_output(result: ToolResult, limit: int) -> ToolOutput:
    """The output of a call for clients that are no policy; text is cut after ``limit`` bytes, larger data left out."""
    content = result.content
    text = content if isinstance(content, str) else "" if content is None else json.dumps(content, default=str)
    structured = result.structured
    if structured is None and not isinstance(content, str):
        structured = content
    kept = structured is not None and len(json.dumps(structured, default=str)) <= limit
    return ToolOutput(
        text=truncate_text(text, limit), structured=to_plain_values(structured) if kept else None, failed=result.failed
    )


def _decode_images(blocks: Sequence[Mapping[str, object]]) -> tuple[EncodedImage, ...]:
    found = (decode_image(block) for block in blocks if block.get("type") == "image")
    return tuple(islice((each for each in found if each is not None), MAX_IMAGES))


def decode_image(block: Mapping[str, Any]) -> EncodedImage | None:
    """The image of a block; None for what is no base64, no image that is read, or too large to be shown."""
    encoded = block.get("data") or ""
    if not isinstance(encoded, str) or len(encoded) * 3 // 4 > MAX_IMAGE_BYTES:
        return None
    try:
        data = base64.b64decode(encoded, validate=True)
    except ValueError:
        return None
    media_type = find_media_type(data)
    if not media_type:
        return None
    width, height = read_png_size(data)
    return EncodedImage(data=data, media_type=media_type, width=width, height=height)


def read_png_size(data: bytes) -> tuple[int, int]:
    """Width and height of a PNG file in pixels; 0 and 0 for other formats."""
    if data[:8] != b"\x89PNG\r\n\x1a\n" or len(data) < 24:
        return 0, 0
    return int.from_bytes(data[16:20], "big"), int.from_bytes(data[20:24], "big")


def _format_block(block: Mapping[str, Any]) -> str:
    match block.get("type"):
        case "text":
            return str(block.get("text", ""))
        case "image" | "audio" as kind:
            return f"[{kind}, {block.get('mimeType')}, {len(block.get('data', '')) * 3 // 4} bytes]"
        case "resource_link":
            return f"[{block.get('name')}: {block.get('uri')}]"
        case "resource":
            resource = block.get("resource", {})
            return str(resource.get("text") or f"[resource {resource.get('uri')}]")
    return f"[{block.get('type')}]"


_ENVELOPE = {
    "_meta": {
        PROTOCOL_VERSION_META_KEY: LATEST_MODERN_VERSION,
        CLIENT_INFO_META_KEY: {"name": "fleetbus", "version": "1"},
        CLIENT_CAPABILITIES_META_KEY: {},
    }
}
"""What every request says of its sender, in place of a handshake."""

_TRANSPORT = TransportContext(kind="direct", can_send_request=False)


class _RequestContext:
    """The way back from a handler to its client: there is none, as nothing listens between two calls."""

    __slots__ = ("cancel_requested",)

    transport = _TRANSPORT
    can_send_request = False
    request_id: RequestId | None = 1
    message_metadata: MessageMetadata = None

    def __init__(self) -> None:
        self.cancel_requested = anyio.Event()

    async def notify(self, method: str, params: Mapping[str, object] | None, opts: CallOptions | None = None) -> None:
        pass

    async def send_raw_request(
        self, method: str, params: Mapping[str, object] | None, opts: CallOptions | None = None
    ) -> dict[str, Any]:
        raise NoBackChannelError(method)

    async def progress(self, progress: float, total: float | None = None, message: str | None = None) -> None:
        pass
