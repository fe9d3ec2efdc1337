"""A small server that speaks OpenEnv 0.10 as observed: sessions over ``/ws``, ``/schema``, error codes, refusal at the limit.

Two worlds: "echo" (one text field; gives back what it is told) and "tools" (an MCP environment with `add` and `fail`). Certain
messages make certain things happen: see `_EchoWorld.step`.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import Any

import anyio
from websockets.asyncio.server import Server, ServerConnection, serve
from websockets.datastructures import Headers
from websockets.exceptions import ConnectionClosed
from websockets.http11 import Request, Response

ECHO_SCHEMA = {
    "type": "object",
    "properties": {"metadata": {"type": "object"}, "message": {"type": "string"}},
    "required": ["message"],
}
MOVE_SCHEMA = {
    "type": "object",
    "properties": {"metadata": {"type": "object"}, "row": {"type": "integer"}, "column": {"type": "integer"}},
    "required": ["row", "column"],
}
TOOLS = [
    {"name": "add", "description": "Add two numbers.", "inputSchema": {"type": "object", "properties": {"a": {}, "b": {}}}},
    {"name": "fail", "description": "Fail.", "inputSchema": {"type": "object"}},
]


class Refused(Exception):
    """An action that does not fit."""

    def __init__(self, errors: list[dict[str, Any]]) -> None:
        super().__init__("refused")
        self.errors = errors


class SessionKilled(Exception):
    """The session ends with SESSION_ERROR."""


class _EchoWorld:
    """Rewards 0.5 per message; over after ``turns`` of them, or at "stop"."""

    is_mcp = False

    def __init__(self, double: OpenEnvDouble) -> None:
        self._double = double
        self.steps = 0
        self.arguments: dict[str, Any] = {}

    def reset(self, arguments: dict[str, Any]) -> dict[str, Any]:
        self.steps, self.arguments = 0, arguments
        return {"observation": {"metadata": {}, "echoed": "ready"}, "reward": None, "done": False}

    async def step(self, action: dict[str, Any]) -> dict[str, Any]:
        message = action.get("message")
        if not isinstance(message, str):
            raise Refused([{"type": "missing", "loc": ["message"], "msg": "Field required"}])
        match message:
            case "boom":
                raise RuntimeError("boom!")
            case "hang":
                self._double.hanging.set()
                await self._double.release.wait()
            case "bad validator":
                raise SessionKilled("Unable to serialize unknown type: <class 'ValueError'>")
        self.steps += 1
        self._double.steps += 1
        over = message == "stop" or self.steps >= self._double.turns
        reward = None if message == "nothing" else 0.5
        return {"observation": {"metadata": {}, "echoed": message}, "reward": reward, "done": over}

    def call(self, method: str, params: dict[str, Any]) -> dict[str, Any]:
        if method not in ("tools/list", "tools/call"):
            return {"error": {"code": -32601, "message": f"Method not found: {method}"}}
        return {"error": {"code": -32603, "message": "Environment does not support MCP", "data": None}}


class _ToolWorld(_EchoWorld):
    """Rewards 1 for a sum of 5, which ends it."""

    is_mcp = True

    async def step(self, action: dict[str, Any]) -> dict[str, Any]:
        if action.get("type") != "call_tool":
            raise Refused([{"type": "missing", "loc": ["tool_name"], "msg": "Field required"}])
        self.steps += 1
        self._double.steps += 1
        name, arguments = action["tool_name"], action["arguments"]
        if name != "add" or not {"a", "b"} <= set(arguments):
            kind = "invalid_args" if name == "add" else "execution_error"
            error = {"error_type": kind, "message": f"{name} cannot be called so"}
            return {"observation": {"tool_name": name, "result": None, "error": error}, "reward": None, "done": False}
        total = arguments["a"] + arguments["b"]
        observation = {"tool_name": name, "result": _result(total), "error": None}
        return {"observation": observation, "reward": float(total == 5), "done": total == 5}

    def call(self, method: str, params: dict[str, Any]) -> dict[str, Any]:
        if method == "tools/list":
            error = {"code": -32603, "message": "the tools are gone"}
            return {"error": error} if self._double.tools_fail else {"result": {"tools": TOOLS}}
        if method == "tools/call" and params["name"] == "add":
            return {"result": _result(params["arguments"]["a"] + params["arguments"]["b"])}
        return {"error": {"code": -32603, "message": f"Unknown tool: {params.get('name')!r}"}}


def _result(value: Any) -> dict[str, Any]:
    content = [{"type": "text", "text": str(value)}]
    return {"content": content, "structured_content": {"result": value}, "meta": None, "data": value, "is_error": False}


class OpenEnvDouble:
    """One server on one port. ``hanging`` is set once a step hangs, ``release`` lets it go on."""

    def __init__(self, *, world: str = "echo", sessions: int = 1000, turns: int = 3, port: int = 0) -> None:
        self.world = world
        self.sessions = sessions
        self.turns = turns
        self.port = port
        self.schema = ECHO_SCHEMA
        self.tools_fail = False
        self.active = 0
        self.most_active = 0
        self.opened = 0
        self.refused = 0
        self.steps = 0
        self.frames: list[dict[str, Any]] = []
        self.hanging, self.release = anyio.Event(), anyio.Event()
        self._server: Server | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        """Listen, on the same port as before if there was one."""
        self._server = await serve(
            self._handle, "127.0.0.1", self.port, process_request=self._answer, ping_interval=None, max_size=16 << 20
        )
        self.port = next(iter(self._server.sockets)).getsockname()[1]

    async def kill(self) -> None:
        """End as a killed process does: every socket is cut at once."""
        assert self._server is not None
        for connection in self._server.connections:
            connection.transport.abort()
        self._server.close(close_connections=False)
        await self._server.wait_closed()

    def _answer(self, connection: ServerConnection, request: Request) -> Response | None:
        if request.path == "/ws":
            return None
        if request.path == "/schema":
            body = json.dumps({"action": self.schema, "observation": {}, "state": {}}).encode()
            headers = Headers({"Content-Type": "application/json", "Content-Length": str(len(body)), "Connection": "close"})
            return Response(200, "OK", headers, body)
        return connection.respond(HTTPStatus.NOT_FOUND, "not here\n")

    async def _handle(self, connection: ServerConnection) -> None:
        if self.active >= self.sessions:
            self.refused += 1
            message = f"Server at capacity: {self.active}/{self.sessions} sessions active. Cannot accept new connections."
            await _send_error(connection, "CAPACITY_REACHED", message, active_sessions=self.active, max_sessions=self.sessions)
            return
        self.opened += 1
        self.active += 1
        self.most_active = max(self.most_active, self.active)
        try:
            await self._serve(connection, (_ToolWorld if self.world == "tools" else _EchoWorld)(self))
        except ConnectionClosed:
            pass
        finally:
            self.active -= 1

    async def _serve(self, connection: ServerConnection, world: _EchoWorld) -> None:
        async for text in connection:
            frame = json.loads(text)
            self.frames.append(frame)
            if frame.get("type") == "close":
                return
            try:
                reply = await self._reply(frame, world)
            except Refused as refused:
                await _send_error(connection, "VALIDATION_ERROR", "Invalid message", errors=refused.errors)
            except SessionKilled as killed:
                await _send_error(connection, "SESSION_ERROR", str(killed))
                return
            except RuntimeError as error:
                await _send_error(connection, "EXECUTION_ERROR", str(error))
            else:
                await connection.send(json.dumps(reply))

    async def _reply(self, frame: dict[str, Any], world: _EchoWorld) -> dict[str, Any]:
        data = frame.get("data", {})
        match frame.get("type"):
            case "reset":
                return {"type": "observation", "data": world.reset(data)}
            case "step":
                return {"type": "observation", "data": await world.step(data)}
            case "state":
                return {"type": "state", "data": {"episode_id": "x", "step_count": world.steps, **world.arguments}}
            case "mcp":
                answer = world.call(data["method"], data.get("params", {}))
                return {"type": "mcp", "data": {"jsonrpc": "2.0", "id": data["id"], **answer}}
        return {"type": "error", "data": {"message": f"Unknown message type: {frame.get('type')}", "code": "UNKNOWN_TYPE"}}


async def _send_error(connection: ServerConnection, code: str, message: str, **more: Any) -> None:
    await connection.send(json.dumps({"type": "error", "data": {"message": message, "code": code, **more}}))


@asynccontextmanager
async def openenv_double(**options: Any) -> AsyncIterator[OpenEnvDouble]:
    """A server that listens; what still hangs is let go at the end."""
    double = OpenEnvDouble(**options)
    await double.start()
    try:
        yield double
    finally:
        double.release.set()
        with anyio.CancelScope(shield=True):
            await double.kill()
