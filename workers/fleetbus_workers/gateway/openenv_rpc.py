"""OpenEnv's JSON-RPC, as its MCP clients speak it over HTTP, over ``WS /mcp``, and inside frames: tools listed and called.

Calling a tool is a step, rewards and counts included, and `reset` is implied if there was none before. Errors are answers.
"""

import json
from typing import Any

from fleetbus.client.sessions import SessionUnavailable
from fleetbus.errors import BusError
from fleetbus_workers.gateway.openenv_episode import AtCapacity, OpenEnvEpisode
from fleetbus_workers.gateway.openenv_frames import FrameError, describe_tools, read_id
from fleetbus_workers.serving.bounded_json import check_values

FAILED = "Error calling tool"
"""What the protocol's own servers say before the words of a tool that failed."""

CREATE, CLOSE = "openenv/session/create", "openenv/session/close"


class RpcError(Exception):
    """An error answer; ``code`` is JSON-RPC's, and ``data``."""

    def __init__(self, code: int, message: str, *, data: Any = None) -> None:
        super().__init__(message)
        self.code = code
        self.data = data


class RpcRequest:
    """One request; ``session`` is its ``params.session_id``."""

    def __init__(self, number: Any, method: str, parameters: dict[str, object]) -> None:
        self.number = number
        self.method = method
        self.parameters = parameters
        self.session = str(parameters.get("session_id") or "")


def read_request(message_body: Any) -> RpcRequest:
    """Raises `RpcError` for what is no request."""
    if not isinstance(message_body, dict) or not isinstance(message_body.get("method"), str):
        raise RpcError(-32600, "a request is an object with a method")
    parameters = message_body.get("params") or {}
    if not isinstance(parameters, dict):
        raise RpcError(-32602, "params must be an object")
    return RpcRequest(read_request_id(message_body), message_body["method"], parameters)


def read_text(body: str | bytes) -> Any:
    """JSON as it was sent. Raises `RpcError`."""
    try:
        check_values(body)
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise RpcError(-32700, "the request is no JSON") from error


def read_request_id(message_body: Any) -> str | int | None:
    """The id that an answer repeats."""
    number = message_body.get("id") if isinstance(message_body, dict) else None
    return number if isinstance(number, (str, int)) and not isinstance(number, bool) else None


async def execute_request(episode: OpenEnvEpisode, request: RpcRequest) -> dict[str, Any]:
    """The result of ``tools/list`` or ``tools/call``. Raises `RpcError`."""
    try:
        if request.method == "tools/list":
            await _ensure_started(episode)
            return {"tools": describe_tools(episode.tools, schema="inputSchema")}
        if request.method == "tools/call":
            return await _call_tool(episode, request.parameters)
    except FrameError as error:
        raise RpcError(-32603, str(error)) from error
    except (AtCapacity, SessionUnavailable, BusError) as error:
        raise RpcError(-32000, str(error)) from error
    raise RpcError(-32601, f"Method not found: {request.method}")


async def _ensure_started(episode: OpenEnvEpisode) -> None:
    if not episode.is_active:
        await episode.reset({})


async def _call_tool(episode: OpenEnvEpisode, parameters: dict[str, object]) -> dict[str, Any]:
    name, arguments = parameters.get("name"), parameters.get("arguments") or {}
    if not isinstance(name, str):
        raise RpcError(-32602, "tools/call needs the name of a tool")
    await _ensure_started(episode)
    if all(tool.name != name for tool in episode.tools):
        raise RpcError(-32603, f"Unknown tool: {name!r}")
    action = {"type": "call_tool", "tool_name": name, "arguments": arguments}
    step_result = await episode.step(action, request_id=read_id(parameters.get("request_id")))
    observed, paid = step_result["observation"], {"reward": step_result["reward"], "done": step_result["done"]}
    if error := observed["error"]:
        words = str(error["message"])
        raise RpcError(-32603, words if words.startswith(FAILED) else f"{FAILED} {name!r}: {words}", data=paid)
    return dict(observed["result"]) | paid


def build_result(number: Any, result: dict[str, object]) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": number, "result": result}


def build_error(number: Any, code: int, message: str, data: object = None) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": number, "error": {"code": code, "message": message, "data": data}}
