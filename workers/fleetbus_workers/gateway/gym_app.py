"""The remote-gym gateway as an ASGI application: routes, key, admission, size limit, expiry. Methods: `gym_methods`."""

import hmac
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import anyio
import msgspec
import structlog
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from fleetbus.client.sessions import SessionUnavailable
from fleetbus.errors import BusError
from fleetbus_workers.gateway.gym_methods import Answer, CallRefused, GymCalls
from fleetbus_workers.gateway.gym_wire import Request, WireError, read_request, write_answer
from fleetbus_workers.serving.browser_guard import BrowserGuard, GuardSettings
from fleetbus_workers.serving.request_body import MAX_BYTES, BodyRefused, read_body

SERVICE = "gym-env-service"
SWEEP_SECONDS = 5.0
CONTENT_TYPES = ("multipart/", "application/json")

log = structlog.get_logger()


class GymSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Names and defaults of the protocol's own server. ``max_inflight`` and ``max_sessions`` 0: no limit here, workers have
    their slots. ``session_timeout`` counts from the end of the last call, in seconds."""

    api_key: str = ""
    max_inflight: int = 0
    admit_timeout: float = 5.0
    max_sessions: int = 0
    session_timeout: float = 3600.0
    max_body_bytes: int = MAX_BYTES
    call_seconds: float = 110.0
    """Below the 120 s that clients of the protocol wait."""
    guard: GuardSettings = GuardSettings()


class GymGateway:
    """One application over `GymCalls`, which ``open_calls`` gives for as long as the application lives."""

    def __init__(self, open_calls: Callable[[], AbstractAsyncContextManager[GymCalls]], settings: GymSettings) -> None:
        self._open_calls = open_calls
        self._settings = settings
        self._guard = msgspec.structs.replace(settings.guard, content_types=CONTENT_TYPES)
        self._admission = anyio.Semaphore(settings.max_inflight) if settings.max_inflight else None
        self._calls: GymCalls | None = None

    def application(self) -> Starlette:
        posted = {"/connect": self._connect, "/call": self._call}
        return Starlette(
            routes=[
                Route("/health", self._health, methods=["GET"]),
                Route("/sessions", self._sessions, methods=["GET"]),
                *(Route(path, answer, methods=["POST"]) for path, answer in posted.items()),
            ],
            lifespan=self._lifespan,
            middleware=[Middleware(BrowserGuard, settings=self._guard), Middleware(_PostRoutes, posted=posted)],
        )

    @asynccontextmanager
    async def _lifespan(self, application: Starlette) -> AsyncIterator[None]:
        async with self._open_calls() as self._calls, anyio.create_task_group() as group:
            group.start_soon(self._expire_idle, self._calls)
            yield
            group.cancel_scope.cancel()

    @property
    def calls(self) -> GymCalls:
        assert self._calls is not None, "the application's lifespan has not begun"
        return self._calls

    def stats(self) -> dict[str, object]:
        """The answer of ``/sessions``; times are Unix seconds, those of a session in use do not run."""
        now, limit = time.monotonic(), self._settings.session_timeout
        listed = [
            {
                "session_id": session,
                "created_at": session_info.created_at,
                "last_access": session_info.last_access,
                "idle_seconds": 0.0 if session_info.busy else now - session_info.used_at,
                "will_timeout_in": limit if session_info.busy else max(0.0, limit - (now - session_info.used_at)),
            }
            for session, session_info in (self._calls.sessions.items() if self._calls else ())
        ]
        limits = {"max_sessions": self._settings.max_sessions, "session_timeout": limit}
        return {"num_sessions": len(listed), **limits, "sessions": listed}

    async def _expire_idle(self, calls: GymCalls) -> None:
        """Close idle sessions until cancelled. A session with a running call is not idle."""
        while True:
            await anyio.sleep(min(SWEEP_SECONDS, self._settings.session_timeout / 4))
            oldest = time.monotonic() - self._settings.session_timeout
            calls.forget_failed(oldest)
            async with anyio.create_task_group() as group:
                for session, session_info in calls.sessions.items():
                    if not session_info.busy and session_info.used_at < oldest:
                        group.start_soon(_expire, calls, session)

    async def _health(self, request: HttpRequest) -> Response:
        limit = self._settings.max_inflight or "unlimited"
        return JSONResponse({"ok": True, "service": SERVICE, "max_inflight": limit, "idempotent": True})

    async def _sessions(self, request: HttpRequest) -> Response:
        if not self._is_authorized(request):
            return _build_detail_response(401, "unauthorized")
        return JSONResponse(self.stats())

    async def _connect(self, request: HttpRequest) -> Response:
        return await self._handle(request, self.calls.connect)

    async def _call(self, request: HttpRequest) -> Response:
        return await self._handle(request, self.calls.call)

    async def _handle(self, http: HttpRequest, execute: Callable[[Request], Awaitable[Answer]]) -> Response:
        if not self._is_authorized(http):
            return _build_detail_response(401, "unauthorized")
        try:
            body = await read_body(http, limit=self._settings.max_body_bytes)  # before admission: slow senders hold no place
            request = read_request(http.headers.get("content-type", ""), body)
            if self._admission is None:
                answer = await execute(request)
            else:
                async with self._admit(self._admission):
                    answer = await execute(request)
        except WireError as error:
            return _build_detail_response(400, str(error))
        except (CallRefused, BodyRefused) as refused:
            return _build_detail_response(refused.status, str(refused))
        except ClientDisconnect:
            return _build_detail_response(400, "the request was aborted by the client")
        except (SessionUnavailable, BusError) as error:
            log.warning("call failed; answering 503", reason=str(error))
            return _build_detail_response(503, "server busy")
        content_type, body = write_answer(answer.fields, answer.images, mime=self.calls.mime)
        return Response(body, headers={"content-type": content_type})

    @asynccontextmanager
    async def _admit(self, admission: anyio.Semaphore) -> AsyncIterator[None]:
        try:
            with anyio.fail_after(self._settings.admit_timeout):
                await admission.acquire()
        except TimeoutError:
            raise CallRefused(503, "server busy") from None
        try:
            yield
        finally:
            admission.release()

    def _is_authorized(self, http: HttpRequest) -> bool:
        if not self._settings.api_key:
            return True
        given = http.query_params.get("token") or http.headers.get("x-api-key", "")
        return hmac.compare_digest(given.encode(), self._settings.api_key.encode())


class _PostRoutes:
    """Answers the paths that are asked with each step without the router, which takes a tenth of a step."""

    def __init__(self, app: ASGIApp, posted: Mapping[str, Callable[[HttpRequest], Awaitable[Response]]]) -> None:
        self._app = app
        self._posted = posted

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = self._posted.get(scope["path"]) if scope["type"] == "http" and scope["method"] == "POST" else None
        if answer is None:
            await self._app(scope, receive, send)
            return
        response = await answer(HttpRequest(scope, receive))
        await response(scope, receive, send)


async def _expire(calls: GymCalls, session: str) -> None:
    try:
        await calls.expire(session)
    except (BusError, SessionUnavailable) as error:
        log.warning("session close failed; leaving it to its idle limit", session=session, reason=str(error))


def _build_detail_response(status: int, detail: str) -> Response:
    return Response(json.dumps({"detail": detail}), status_code=status, media_type="application/json")
