"""One instance of the platform's only environment: a shop with a database, tools over MCP, a screen, and a manager."""

from __future__ import annotations

import base64
import sqlite3
import struct
import zlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
from mcp.server import MCPServer
from mcp_types import ImageContent, TextContent
from starlette.applications import Starlette

SCREEN = (800, 600)


class Shop:
    """What the instance holds. ``clicked`` are the pixels that were clicked on; ``calls`` the tools in order of their calls."""

    def __init__(self) -> None:
        self.database = sqlite3.connect(":memory:", check_same_thread=False)
        self.calls: list[str] = []
        self.clicked: list[Any] = []
        self.resets: list[dict[str, Any]] = []
        self.hanging, self.released = anyio.Event(), anyio.Event()
        self.fill()

    def fill(self) -> None:
        self.database.executescript(
            "DROP TABLE IF EXISTS items; CREATE TABLE items (name TEXT PRIMARY KEY, price INTEGER, ordered INTEGER);"
            "INSERT INTO items VALUES ('pen', 3, 0), ('ink', 9, 0);"
        )

    def query(self, sql: str, args: list[Any]) -> dict[str, Any]:
        try:
            cursor = self.database.execute(sql, args)
            rows = [list(row) for row in cursor.fetchall()]
        except sqlite3.Error as error:
            return {"success": False, "error": str(error), "message": "query failed"}
        columns = [column[0] for column in cursor.description or ()]
        return {"success": True, "columns": columns, "rows": rows, "message": "ok"}

    # Tools

    async def price(self, name: str) -> str:
        """What an item costs."""
        self.calls.append("price")
        row = self.database.execute("SELECT price FROM items WHERE name = ?", [name]).fetchone()
        return str(row[0]) if row else '{"error": "no such item"}'

    async def order(self, name: str) -> str:
        """Order an item."""
        self.calls.append("order")
        self.database.execute("UPDATE items SET ordered = ordered + 1 WHERE name = ?", [name])
        return "ordered"

    async def hang(self) -> str:
        """Answers when it is told to."""
        self.calls.append("hang")
        self.hanging.set()
        await self.released.wait()
        return "late"

    async def computer(self, action: str, coordinate: list[float] | None = None) -> list[Any]:
        self.calls.append(f"computer {action}")
        if action == "left_click":
            self.clicked.append(coordinate)
        image = ImageContent(data=base64.b64encode(png(len(self.calls))).decode(), mime_type="image/png")
        return [TextContent(text=f"did {action}"), image]

    def servers(self) -> dict[str, Starlette]:
        """MCP applications by endpoint: tools for everybody at one, the screen at the other."""
        tools = MCPServer("shop")
        for tool in (self.price, self.order, self.hang):
            tools.add_tool(tool)
        screen = MCPServer("screen")
        description = f"Use the computer. Screen resolution: {SCREEN[0]}x{SCREEN[1]}"
        screen.add_tool(self.computer, description=description, structured_output=False)
        return {"mcp": tools.streamable_http_app(), "api/v1/mcp": screen.streamable_http_app()}


@asynccontextmanager
async def served(application: Starlette) -> AsyncIterator[None]:
    """What the application needs while it is used; entered and left in one task."""
    async with application.router.lifespan_context(application):
        yield


def png(shade: int) -> bytes:
    """A grey picture of 4 by 3 pixels."""
    rows = b"".join(b"\0" + bytes([shade % 256]) * 4 for _ in range(3))
    header = struct.pack("!IIBBBBB", 4, 3, 8, 0, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(rows)), (b"IEND", b""))
    body = b"".join(
        struct.pack("!I", len(data)) + name + data + struct.pack("!I", zlib.crc32(name + data)) for name, data in chunks
    )
    return b"\x89PNG\r\n\x1a\n" + body
