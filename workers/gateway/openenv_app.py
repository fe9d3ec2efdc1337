"""The OpenEnv gateway as an ASGI application: ``/ws``, ``/mcp``, ``/health``, ``/metadata``, ``/schema``.

A frame that is wrong in any way is answered by an error frame and harms nothing; only a connection's end, or its environment's,
ends a session. Whoever stops answering pings is gone, and its slot is free.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import anyio
import msgspec
import structlog
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route, WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect

from fleetbus.client.sessions import SessionClient, SessionUnavailable
from fleetbus.errors import BusError
from workers.gateway.openenv_episode import AtCapacity, FrameError, OpenEnvEpisode

MAX_RPC_BYTES = 16 << 20

ACTION_SCHEMA = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "type": {"enum": ["call_tool", "list_tools"]},
        "tool_name": {"type": "string"},
        "arguments": {"type": "object"},
        "metadata": {"type": "object"},
    },
}
OBSERVATION_SCHEMA = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "messages": {"type": "array"},
        "tools": {"type": "array"},
        "metadata": {"type": "object"},
    },
}
STATE_SCHEMA = {"type": "object", "properties": {"episode_id": {"type": ["string", "null"]}, "step_count": {"type": "integer"}}}

log = structlog.get_logger()


class OpenEnvSettings(msgspec.Struct, frozen=True, kw_only=True):
    """``capacity_timeout``: seconds a reset waits for a slot; ``max_sessions``: most sessions made over ``POST /mcp``."""

    capacity_timeout: float = 30.0
    call_seconds: float = 600.0
    max_sessions: int = 256


class OpenEnvGateway:
    """One application; ``entered`` gives the client of the bus for as long as it lives."""

    def __init__(self, entered: Callable[[], AbstractAsyncContextManager[SessionClient]], settings: OpenEnvSettings) -> None:
        self._entered = entered
        self._settings = settings
        self._client: SessionClient | None = None
        self._by_name: dict[str, OpenEnvEpisode] = {}

    def application(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/health", _health, methods=["GET"]),
                Route("/metadata", _metadata, methods=["GET"]),
                Route("/schema", _schema, methods=["GET"]),
                Route("/mcp", self._mcp, methods=["POST"]),
                WebSocketRoute("/ws", self._serve),
            ],
            lifespan=self._lifespan,
        )

    @asynccontextmanager
    async def _lifespan(self, application: Starlette) -> AsyncIterator[None]:
        async with self._entered() as self._client:
            yield
            for episode in list(self._by_name.values()):
                await self._closed(episode)

    def _episode(self) -> OpenEnvEpisode:
        assert self._client is not None, "the application's lifespan has not begun"
        settings = self._settings
        return OpenEnvEpisode(self._client, capacity_seconds=settings.capacity_timeout, call_seconds=settings.call_seconds)

    async def _serve(self, socket: WebSocket) -> None:
        """One connection, one session. ``?session_id=`` goes on with one that was made over ``POST /mcp``."""
        await socket.accept()
        wanted = socket.query_params.get("session_id")
        episode = self._by_name.pop(wanted, None) if wanted else self._episode()
        if episode is None:
            await _refuse(socket, "SESSION_ERROR", f"Unknown session_id: {wanted}")
            return
        try:
            await self._converse(socket, episode)
        except WebSocketDisconnect:
            log.debug("client is gone", session=episode.name)
        except AtCapacity as error:
            await _refuse(socket, "CAPACITY_REACHED", f"Server at capacity: {error}")
        finally:
            with anyio.CancelScope(shield=True):  # bounded by the limit of the call
                await self._closed(episode)

    async def _converse(self, socket: WebSocket, episode: OpenEnvEpisode) -> None:
        while True:
            received = await socket.receive()
            if received["type"] == "websocket.disconnect":
                return
            try:
                kind, data = _frame(received.get("text"))
                if kind == "close":
                    await socket.close(1000)
                    return
                answer = await self._answer(episode, kind, data)
            except FrameError as error:
                answer = {"type": "error", "data": {"message": str(error), "code": error.code} | error.details}
            except (SessionUnavailable, BusError) as error:
                answer = {"type": "error", "data": {"message": str(error), "code": "EXECUTION_ERROR"}}
            await socket.send_text(json.dumps(answer, ensure_ascii=False, allow_nan=False))

    async def _answer(self, episode: OpenEnvEpisode, kind: str, data: Any) -> dict[str, Any]:
        match kind:
            case "reset":
                return {"type": "observation", "data": await episode.reset(_object(data or {}))}
            case "step":
                return {"type": "observation", "data": await episode.step(_object(data))}
            case "state":
                return {"type": "state", "data": await episode.state()}
            case "mcp":
                return {"type": "mcp", "data": await episode.rpc(data)}
        raise FrameError("UNKNOWN_TYPE", f"Unknown message type: {kind}")

    async def _mcp(self, request: Request) -> Response:
        """JSON-RPC over HTTP: sessions are made, used by ``params.session_id``, closed."""
        body = bytearray()
        async for chunk in request.stream():
            body += chunk
            if len(body) > MAX_RPC_BYTES:
                return JSONResponse({"detail": f"a request may have {MAX_RPC_BYTES} bytes"}, status_code=413)
        try:
            asked = json.loads(bytes(body))
        except (ValueError, RecursionError):
            return JSONResponse(_failure(None, -32700, "the request is no JSON"))
        if not isinstance(asked, dict):
            return JSONResponse(_failure(None, -32600, "a request is an object"))
        return JSONResponse(await self._called(asked))

    async def _called(self, asked: dict[str, Any]) -> dict[str, Any]:
        number, method = asked.get("id"), asked.get("method")
        parameters = asked.get("params") or {}
        parameters = parameters if isinstance(parameters, dict) else {}
        if method == "openenv/session/create":
            return await self._created(number, parameters)
        session = str(parameters.get("session_id", ""))
        episode = self._by_name.get(session)
        if episode is None:
            return _failure(number, -32602, f"Unknown session_id: {session or '(none)'}; openenv/session/create makes one")
        if method == "openenv/session/close":
            del self._by_name[session]
            await self._closed(episode)
            return {"jsonrpc": "2.0", "id": number, "result": {"session_id": session, "closed": True}}
        return await episode.rpc(asked)

    async def _created(self, number: Any, parameters: dict[str, Any]) -> dict[str, Any]:
        if len(self._by_name) >= self._settings.max_sessions:
            return _failure(number, -32000, "Server at capacity")
        episode = self._episode()
        try:
            await episode.reset({name: value for name, value in parameters.items() if name != "session_id"})
        except (AtCapacity, FrameError, SessionUnavailable, BusError) as error:
            await self._closed(episode)
            return _failure(number, -32000, str(error))
        self._by_name[episode.name] = episode
        return {"jsonrpc": "2.0", "id": number, "result": {"session_id": episode.name}}

    async def _closed(self, episode: OpenEnvEpisode) -> None:
        try:
            await episode.close()
        except (SessionUnavailable, BusError) as error:
            log.warning("session not closed", reason=str(error))


async def _refuse(socket: WebSocket, code: str, message: str) -> None:
    """A last word to a connection that may be gone already."""
    try:
        await socket.send_json({"type": "error", "data": {"message": message, "code": code}})
        await socket.close(1000)
    except (WebSocketDisconnect, RuntimeError) as error:
        log.debug("client was gone", reason=str(error))


def _frame(text: str | None) -> tuple[str, Any]:
    if text is None:
        raise FrameError("INVALID_JSON", "frames are text")
    try:
        frame = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise FrameError("INVALID_JSON", f"Invalid JSON: {error}") from error
    if not isinstance(frame, dict):
        raise FrameError("VALIDATION_ERROR", "a frame is an object")
    if unknown := set(frame) - {"type", "data"}:
        raise FrameError("VALIDATION_ERROR", f"a frame has a type and data, not {', '.join(sorted(unknown))}")
    return str(frame.get("type", "")), frame.get("data")


def _object(data: Any) -> dict[str, Any]:
    if not isinstance(data, dict):
        raise FrameError("VALIDATION_ERROR", "data must be an object")
    return data


def _failure(number: Any, code: int, message: str) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": number, "error": {"code": code, "message": message, "data": None}}


async def _health(request: Request) -> Response:
    return JSONResponse({"status": "healthy"})


async def _metadata(request: Request) -> Response:
    about = {"name": "fleetbus", "description": "Environments of a fleetbus run", "version": "0.1.0"}
    return JSONResponse(about | {"readme_content": None, "author": None, "documentation_url": None})


async def _schema(request: Request) -> Response:
    return JSONResponse({"action": ACTION_SCHEMA, "observation": OBSERVATION_SCHEMA, "state": STATE_SCHEMA})
