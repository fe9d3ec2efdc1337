"""A little MCP server over HTTP, as the server of an environment that is started per episode: ``PORT [fail|hang]``."""

from __future__ import annotations

import os
import sys
import time


def main() -> None:
    port, mode = int(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else ""
    if mode == "fail":
        sys.exit("no database")
    if mode == "hang":
        time.sleep(600)
    from mcp.server.mcpserver import MCPServer

    server = MCPServer("served")

    @server.tool()
    def look() -> str:
        """Says what this server knows of itself."""
        return " ".join(
            f"{key}={os.environ.get(key)}" for key in ("FLEETBUS_SERVER_RUN", "FLEETBUS_SERVER_EPISODE", "FLEETBUS_SECRET")
        )

    server.run(transport="streamable-http", host="127.0.0.1", port=port)


if __name__ == "__main__":
    main()
