"""An MCP server object, ``mcp:tests.support.shelf_server:shelf``: tools that give text, data, and nothing but errors."""

from __future__ import annotations

from typing import Any

from mcp.server import Server
from mcp.server.context import ServerRequestContext
from mcp_types import CallToolRequestParams, CallToolResult, ListToolsResult, PaginatedRequestParams, TextContent, Tool

from fleetbus_schemas import Task

NAMES = ("say", "add", "fail", "error_text")


def shelf(task: Task) -> Server[Any]:
    return Server("shelf", on_list_tools=_list, on_call_tool=_call)


async def _list(_: ServerRequestContext[Any], __: PaginatedRequestParams | None) -> ListToolsResult:
    schema = {"type": "object", "properties": {}}
    return ListToolsResult(tools=[Tool(name=name, description=f"It can {name}.", input_schema=schema) for name in NAMES])


async def _call(_: ServerRequestContext[Any], params: CallToolRequestParams) -> CallToolResult:
    arguments = params.arguments or {}
    match params.name:
        case "say":
            return CallToolResult(content=[TextContent(text=f"it says {arguments.get('word')}")])
        case "add":
            total = arguments["a"] + arguments["b"]
            return CallToolResult(content=[TextContent(text=str(total))], structured_content={"result": total})
        case "error_text":
            return CallToolResult(content=[TextContent(text="Error calling tool 'error_text': no such thing")], is_error=True)
    return CallToolResult(content=[TextContent(text="the shelf is empty")], is_error=True)
