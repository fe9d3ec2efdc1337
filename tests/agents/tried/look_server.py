"""A server of the Model Context Protocol with one tool, over stdin and stdout: ``python look_server.py``."""

from __future__ import annotations

from mcp.server.mcpserver import MCPServer

server = MCPServer("places")


@server.tool()
def peek(at: int) -> str:
    """Peeks at a place and says what is there."""
    return f"peek-{10 * at}"


if __name__ == "__main__":
    server.run(transport="stdio")
