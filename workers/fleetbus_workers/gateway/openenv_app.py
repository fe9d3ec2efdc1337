"""The OpenEnv gateway as an ASGI application: ``/ws``, ``/mcp``, ``/reset``, ``/step``, ``/state``, and `openenv_metadata`.

A frame that is wrong in any way is answered by an error frame and harms nothing; only a connection's end, or its environment's,
ends a session. A client without pongs is disconnected, its slot freed. ``/sessions/<name>`` has the same routes for a
session that outlives connections and gateways, so that a client's whole episode goes over HTTP, or resumes over WebSocket.
"""

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import anyio
import msgspec
import structlog
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Mount, Route, WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect, WebSocketState

from fleetbus.client.sessions import SessionClient, SessionUnavailable
from fleetbus.errors import BusError
from fleetbus_schemas.subjects import InvalidName, check_name
from fleetbus_workers.gateway.bearer import Guarded
from fleetbus_workers.gateway.images import LoadImage
from fleetbus_workers.gateway.openenv_episode import NOT_STARTED, AtCapacity, OpenEnvEpisode
from fleetbus_workers.gateway.openenv_frames import FrameError, read_frame, read_id, read_object, write_json
from fleetbus_workers.gateway.openenv_metadata import build_metadata_routes
from fleetbus_workers.gateway.openenv_rpc import (
    CLOSE,
    CREATE,
    RpcError,
    RpcRequest,
    build_error,
    build_result,
    execute_request,
    read_request,
    read_request_id,
    read_text,
)
from fleetbus_workers.gateway.openenv_sessions import OpenEnvSessions, close_episode
from fleetbus_workers.serving.browser_guard import BrowserGuard, GuardSettings
from fleetbus_workers.serving.request_body import BodyRefused, read_body

MAX_NAME_CHARACTERS = 100
"""Room for the number of an environment in the names of sessions on the bus."""

log = structlog.get_logger()


class OpenEnvSettings(msgspec.Struct, frozen=True, kw_only=True):
    """``capacity_timeout``: seconds a reset waits for a slot; ``max_sessions``: most named sessions, which are closed after
    ``session_timeout`` seconds without a call, or ``resume_timeout`` after their connection broke off; ``idle_timeout``:
    seconds without a frame until a socket that has no environment is closed (its client reconnects with its next call);
    ``token``: what clients have to send as ``Authorization: Bearer``, empty for nothing."""

    capacity_timeout: float = 30.0
    idle_timeout: float = 600.0
    call_seconds: float = 600.0
    max_sessions: int = 1024
    session_timeout: float = 1800.0
    resume_timeout: float = 60.0
    token: str = ""
    guard: GuardSettings = GuardSettings()


class OpenEnvGateway:
    """One application; ``open_client`` opens the client of the bus, ``build_loader`` builds the function that reads images."""

    def __init__(
        self,
        open_client: Callable[[], AbstractAsyncContextManager[SessionClient]],
        settings: OpenEnvSettings,
        *,
        build_loader: Callable[[SessionClient], LoadImage | None] = lambda _: None,
    ) -> None:
        self._open_client = open_client
        self._settings = settings
        self._build_loader = build_loader
        self._client: SessionClient | None = None
        self._load: LoadImage | None = None
        self._sessions = OpenEnvSessions(
            self._build_episode,
            max_sessions=settings.max_sessions,
            idle_seconds=settings.session_timeout,
            resume_seconds=settings.resume_timeout,
        )

    def application(self) -> Starlette:
        routes = [
            Route("/reset", self._reset, methods=["POST"]),
            Route("/step", self._step, methods=["POST"]),
            Route("/state", self._state, methods=["GET"]),
            Route("/mcp", self._mcp, methods=["POST"]),
            WebSocketRoute("/mcp", self._serve_mcp),
            WebSocketRoute("/ws", self._serve),
        ]
        mounted = Mount("/sessions/{session}", routes=[*routes, *build_metadata_routes()])
        guard = msgspec.structs.replace(self._settings.guard, content_types=("application/json",))
        middleware = [Middleware(BrowserGuard, settings=guard)]
        if self._settings.token:
            middleware.append(Middleware(Guarded, token=self._settings.token))
        return Starlette(routes=[*routes, mounted, *build_metadata_routes()], lifespan=self._lifespan, middleware=middleware)

    @asynccontextmanager
    async def _lifespan(self, application: Starlette) -> AsyncIterator[None]:
        async with self._open_client() as self._client, anyio.create_task_group() as group:
            self._load = self._build_loader(self._client)
            group.start_soon(self._sessions.run)
            yield
            group.cancel_scope.cancel()

    def _build_episode(self, name: str = "") -> OpenEnvEpisode:
        assert self._client is not None, "the application's lifespan has not begun"
        return OpenEnvEpisode(
            self._client,
            capacity_seconds=self._settings.capacity_timeout,
            call_seconds=self._settings.call_seconds,
            name=name,
            load=self._load,
        )

    @asynccontextmanager
    async def _open_private_session(self) -> AsyncIterator[OpenEnvEpisode]:
        """An unnamed session, closed at the end."""
        episode = self._build_episode()
        try:
            yield episode
        finally:
            await close_episode(episode)

    # WebSockets

    async def _serve(self, socket: WebSocket) -> None:
        """One connection, one session: one's own, or the named one, which ``?session_id=`` finds and never makes."""
        await socket.accept()
        requested_name, named = socket.query_params.get("session_id"), socket.path_params.get("session")
        try:
            if not requested_name and not named:
                async with self._open_private_session() as episode:
                    await self._handle_frames(socket, episode)
                return
            name, ended = _parse_session_name(requested_name or named), False
            async with self._sessions.connect(name, make=not requested_name) as found:
                if found is None:
                    await _refuse(socket, "SESSION_ERROR", f"Unknown session_id: {requested_name}")
                    return
                ended = await self._handle_frames(socket, found)
            if ended and not requested_name:
                await self._sessions.close(name)
        except WebSocketDisconnect:
            log.debug("client disconnected; ending its session")
        except (AtCapacity, FrameError) as error:
            code = error.code if isinstance(error, FrameError) else "CAPACITY_REACHED"
            await _refuse(socket, code, f"Server at capacity: {error}" if code == "CAPACITY_REACHED" else str(error))
        except (SessionUnavailable, BusError) as error:  # the log is away: the client may come again
            await _refuse(socket, "EXECUTION_ERROR", str(error))
        if socket.application_state is WebSocketState.CONNECTED:  # another connection continues this session
            await _close(socket, 1001)

    async def _handle_frames(self, socket: WebSocket, episode: OpenEnvEpisode) -> bool:
        """Serve frames until the client disconnects; True if it sent a close frame."""
        while True:
            received = await self._receive(socket, episode)
            if received is None:
                await _close(socket, 1001)
                return False
            if received["type"] == "websocket.disconnect":
                return False
            try:
                kind, data = read_frame(received.get("text"))
                if kind == "close":
                    await _close(socket, 1000)
                    return True
                answer = await self._answer(episode, kind, data)
            except FrameError as error:
                answer = {"type": "error", "data": {"message": str(error), "code": error.code} | error.details}
            except (SessionUnavailable, BusError) as error:
                answer = {"type": "error", "data": {"message": str(error), "code": "EXECUTION_ERROR"}}
            await socket.send_text(write_json(answer))

    async def _receive(self, socket: WebSocket, episode: OpenEnvEpisode) -> Any:
        """The next event; None when nothing came for too long from a client without an environment."""
        if episode.is_active:
            return await socket.receive()
        with anyio.move_on_after(self._settings.idle_timeout):
            return await socket.receive()
        return None

    async def _answer(self, episode: OpenEnvEpisode, kind: str, data: Any) -> dict[str, Any]:
        match kind:
            case "reset":
                return {"type": "observation", "data": await episode.reset(read_object(data or {}))}
            case "step":
                return {"type": "observation", "data": await episode.step(read_object(data))}
            case "state":
                return {"type": "state", "data": await episode.state()}
            case "mcp":
                return {"type": "mcp", "data": await self._answer_request(data, episode)}
        raise FrameError("UNKNOWN_TYPE", f"Unknown message type: {kind}")

    async def _serve_mcp(self, socket: WebSocket) -> None:
        """JSON-RPC over a WebSocket: one connection, one session."""
        await socket.accept()
        try:
            async with self._open_private_session() as episode:
                while True:
                    received = await socket.receive()
                    if received["type"] == "websocket.disconnect":
                        return
                    await socket.send_text(write_json(await self._answer_text(received.get("text") or "", episode)))
        except WebSocketDisconnect:
            log.debug("client disconnected; ending its session")

    # HTTP

    async def _reset(self, request: Request) -> Response:
        return await self._handle_call(request, self._reset_episode, make=True)

    async def _step(self, request: Request) -> Response:
        return await self._handle_call(request, self._step_episode, make=False)

    async def _reset_episode(self, episode: OpenEnvEpisode, body: dict[str, Any]) -> dict[str, object]:
        return await episode.reset(body)

    async def _step_episode(self, episode: OpenEnvEpisode, body: dict[str, Any]) -> dict[str, object]:
        timeout = body.get("timeout_s")
        if timeout is not None and (isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not timeout > 0):
            raise FrameError("VALIDATION_ERROR", "timeout_s must be a number of seconds above 0")
        action, request_id = read_object(body.get("action")), read_id(body.get("request_id"))
        result = await episode.step(action, request_id=request_id, timeout=timeout)
        if result["done"]:
            await close_episode(episode)
        return result

    async def _handle_call(self, request: Request, execute: Callable[..., Any], *, make: bool) -> Response:
        """Without a name a reset is an environment of its own, closed at once, as in the protocol's servers; a step, which
        those execute on an environment that was never reset, is refused."""
        try:
            body = read_object(_parse_json_body(await read_body(request)))
            name = request.path_params.get("session")
            if name is not None:
                async with self._sessions.use(_parse_session_name(name), make=make) as episode:
                    if episode is None:
                        raise FrameError("EXECUTION_ERROR", NOT_STARTED, status=409)
                    observed = await execute(episode, body)
            elif make:
                async with self._open_private_session() as episode:
                    observed = await execute(episode, body)
            else:
                words = "over HTTP an episode continues under /sessions/<name>/step, after /sessions/<name>/reset"
                raise FrameError("EXECUTION_ERROR", f"{NOT_STARTED}; {words}", status=409)
        except FrameError as error:
            return _build_error_response(error)
        except BodyRefused as refused:
            return _build_detail_response(refused.status, str(refused))
        except ClientDisconnect:
            return _build_detail_response(400, "the request was aborted by the client")
        except AtCapacity as error:
            return _build_detail_response(503, f"Server at capacity: {error}")
        except (SessionUnavailable, BusError) as error:
            return _build_detail_response(504, str(error))
        return _build_json_response({"metadata": None} | observed)

    async def _state(self, request: Request) -> Response:
        """Of a named session, or of nothing: those who have no session have no episode."""
        try:
            name = request.path_params.get("session")
            if name is None:
                return JSONResponse({"episode_id": None, "step_count": 0})
            async with self._sessions.use(_parse_session_name(name), make=False) as episode:
                result = {"episode_id": None, "step_count": 0} if episode is None else await episode.state()
        except FrameError as error:
            return _build_error_response(error)
        except (SessionUnavailable, BusError, AtCapacity) as error:
            return _build_detail_response(504, str(error))
        return _build_json_response(result)

    # JSON-RPC

    async def _mcp(self, request: Request) -> Response:
        """JSON-RPC over HTTP, always 200. A call without a session, or a name, gets an environment for itself alone."""
        try:
            body = await read_body(request)
        except BodyRefused as refused:
            return _build_detail_response(refused.status, str(refused))
        except ClientDisconnect:
            return _build_detail_response(400, "the request was aborted by the client")
        return _build_json_response(await self._answer_text(body, None, name=request.path_params.get("session", "")))

    async def _answer_text(self, text: str | bytes, episode: OpenEnvEpisode | None, *, name: str = "") -> dict[str, Any]:
        try:
            message_body = read_text(text)
        except RpcError as error:
            return build_error(None, error.code, str(error))
        return await self._answer_request(message_body, episode, name=name)

    async def _answer_request(self, message_body: Any, episode: OpenEnvEpisode | None, *, name: str = "") -> dict[str, object]:
        """The answer to one request, which is for ``episode`` unless it names a session."""
        try:
            request = read_request(message_body)
            if request.method == CREATE:
                return build_result(request.number, await self._create_session(request))
            if request.method == CLOSE:
                return build_result(request.number, await self._close_session(request))
            if request.session or name:
                async with self._sessions.use(_parse_session_name(request.session or name), make=not request.session) as found:
                    if found is None:
                        raise RpcError(-32602, f"Unknown session_id: {request.session}")
                    return build_result(request.number, await execute_request(found, request))
            if episode is not None:
                return build_result(request.number, await execute_request(episode, request))
            async with self._open_private_session() as own:
                return build_result(request.number, await execute_request(own, request))
        except RpcError as error:
            return build_error(read_request_id(message_body), error.code, str(error), error.data)
        except FrameError as error:
            return build_error(read_request_id(message_body), -32602, str(error))
        except AtCapacity as error:
            return build_error(read_request_id(message_body), -32000, f"Server at capacity: {error}")
        except (SessionUnavailable, BusError) as error:
            return build_error(read_request_id(message_body), -32000, str(error))

    async def _create_session(self, request: RpcRequest) -> dict[str, Any]:
        name = self._build_episode().name
        async with self._sessions.use(name, make=True) as episode:
            assert episode is not None
            try:
                await episode.reset({key: value for key, value in request.parameters.items() if key != "session_id"})
            except (AtCapacity, FrameError, SessionUnavailable, BusError) as error:
                await close_episode(episode)
                raise RpcError(-32000, str(error)) from error
        return {"session_id": name}

    async def _close_session(self, request: RpcRequest) -> dict[str, Any]:
        if not request.session or not await self._sessions.close(_parse_session_name(request.session)):
            raise RpcError(-32602, f"Unknown session_id: {request.session or '(none)'}; {CREATE} makes one")
        return {"session_id": request.session, "closed": True}


def _parse_session_name(given: str | None) -> str:
    """A session's name, as far as it can be one."""
    name = str(given)
    try:
        check_name("session", name)
    except InvalidName as error:
        raise FrameError("SESSION_ERROR", f"Unknown session_id: {error}", status=404) from error
    if len(name) > MAX_NAME_CHARACTERS:
        raise FrameError("SESSION_ERROR", f"a session's name has at most {MAX_NAME_CHARACTERS} characters", status=404)
    return name


def _parse_json_body(body: bytes) -> Any:
    try:
        return read_text(body) if body else {}
    except RpcError as error:
        raise FrameError("VALIDATION_ERROR", "the body is no JSON") from error


def _build_json_response(content: Any) -> Response:
    return Response(write_json(content), media_type="application/json")


def _build_error_response(error: FrameError) -> Response:
    """An error as the protocol's servers tell it: what does not validate as a list, all else as a text."""
    if error.code == "VALIDATION_ERROR":
        return _build_detail_response(error.status, [{"type": "value_error", "loc": ["body"], "msg": str(error)}])
    return _build_detail_response(error.status, str(error), **error.details)


def _build_detail_response(status: int, detail: Any, **more: object) -> Response:
    return Response(write_json({"detail": detail} | more), status_code=status, media_type="application/json")


async def _refuse(socket: WebSocket, code: str, message: str) -> None:
    """Send an error to a connection that may be closed already."""
    try:
        await socket.send_text(write_json({"type": "error", "data": {"message": message, "code": code}}))
    except (WebSocketDisconnect, RuntimeError) as error:
        log.debug("client disconnected before the last message", reason=str(error))
    await _close(socket, 1000)


async def _close(socket: WebSocket, code: int) -> None:
    try:
        await socket.close(code)
    except (WebSocketDisconnect, RuntimeError) as error:
        log.debug("client disconnected before the last message", reason=str(error))
