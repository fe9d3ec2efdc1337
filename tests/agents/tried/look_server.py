"""A server of the Model Context Protocol with one tool, over stdin and stdout, in its plainest form: ``python look_server.py``.

Any client's version of the protocol that begins with `initialize` is its own; what it does not know it refuses as unknown.
"""

from __future__ import annotations

import json
import sys
from typing import Any

PEEK = {
    "name": "peek",
    "description": "Peeks at a place and says what is there.",
    "inputSchema": {"type": "object", "properties": {"at": {"type": "integer"}}, "required": ["at"]},
}
UNKNOWN = -32601


def answer(method: str, given: dict[str, Any]) -> dict[str, Any] | None:
    """The result of a request; None for a method that is not known."""
    if method == "initialize":
        version = given.get("protocolVersion", "2025-06-18")
        return {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": {"name": "places", "version": "1"}}
    if method == "tools/list":
        return {"tools": [PEEK]}
    if method == "tools/call":
        return {"content": [{"type": "text", "text": f"peek-{10 * int(given['arguments']['at'])}"}], "isError": False}
    return {} if method == "ping" else None


def main() -> None:
    for line in sys.stdin:
        request = json.loads(line)
        if "id" not in request or "method" not in request:
            continue
        result = answer(request["method"], request.get("params") or {})
        said = {"error": {"code": UNKNOWN, "message": "unknown method"}} if result is None else {"result": result}
        print(json.dumps({"jsonrpc": "2.0", "id": request["id"], **said}), flush=True)


if __name__ == "__main__":
    main()
