"""The remote-gym gateway as an ASGI application: routes, key, admission, size limit, expiry. Methods: `gym_calls`."""

from __future__ import annotations

import hmac
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import anyio
import msgspec
import structlog
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from fleetbus.client.sessions import SessionUnavailable
from fleetbus.errors import BusError
from fleetbus_workers.gateway.bodies import MAX_BYTES, BodyRefused, read_body
from fleetbus_workers.gateway.gym_calls import Answer, GymCalls, Refused
from fleetbus_workers.gateway.gym_wire import Request, WireError, read_request, write_answer

SERVICE = "gym-env-service"
SWEEP_SECONDS = 5.0

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


class GymGateway:
    """One application over `GymCalls`, which ``entered`` gives for as long as the application lives."""

    def __init__(self, entered: Callable[[], AbstractAsyncContextManager[GymCalls]], settings: GymSettings) -> None:
        self._entered = entered
        self._settings = settings
        self._admission = anyio.Semaphore(settings.max_inflight) if settings.max_inflight else None
        self._calls: GymCalls | None = None

    def application(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/health", self._health, methods=["GET"]),
                Route("/sessions", self._sessions, methods=["GET"]),
                Route("/connect", self._connect, methods=["POST"]),
                Route("/call", self._call, methods=["POST"]),
            ],
            lifespan=self._lifespan,
        )

    @asynccontextmanager
    async def _lifespan(self, application: Starlette) -> AsyncIterator[None]:
        async with self._entered() as self._calls, anyio.create_task_group() as group:
            group.start_soon(self._sweep, self._calls)
            yield
            group.cancel_scope.cancel()

    @property
    def calls(self) -> GymCalls:
        assert self._calls is not None, "the application's lifespan has not begun"
        return self._calls

    def stats(self) -> dict[str, Any]:
        """What ``/sessions`` says; times are Unix seconds, those of a session in use do not run."""
        now, limit = time.monotonic(), self._settings.session_timeout
        listed = [
            {
                "session_id": session,
                "created_at": known.created_at,
                "last_access": known.last_access,
                "idle_seconds": 0.0 if known.busy else now - known.used_at,
                "will_timeout_in": limit if known.busy else max(0.0, limit - (now - known.used_at)),
            }
            for session, known in (self._calls.sessions.items() if self._calls else ())
        ]
        limits = {"max_sessions": self._settings.max_sessions, "session_timeout": limit}
        return {"num_sessions": len(listed), **limits, "sessions": listed}

    async def _sweep(self, calls: GymCalls) -> None:
        """For ever: close what nobody uses. A session with a call in work is in use."""
        while True:
            await anyio.sleep(min(SWEEP_SECONDS, self._settings.session_timeout / 4))
            oldest = time.monotonic() - self._settings.session_timeout
            async with anyio.create_task_group() as group:
                for session, known in calls.sessions.items():
                    if not known.busy and known.used_at < oldest:
                        group.start_soon(_expire, calls, session)

    async def _health(self, request: HttpRequest) -> Response:
        limit = self._settings.max_inflight or "unlimited"
        return JSONResponse({"ok": True, "service": SERVICE, "max_inflight": limit, "idempotent": True})

    async def _sessions(self, request: HttpRequest) -> Response:
        if not self._permitted(request):
            return _detail(401, "unauthorized")
        return JSONResponse(self.stats())

    async def _connect(self, request: HttpRequest) -> Response:
        return await self._answered(request, self.calls.connect)

    async def _call(self, request: HttpRequest) -> Response:
        return await self._answered(request, self.calls.call)

    async def _answered(self, http: HttpRequest, execute: Callable[[Request], Awaitable[Answer]]) -> Response:
        if not self._permitted(http):
            return _detail(401, "unauthorized")
        try:
            body = await read_body(http, limit=self._settings.max_body_bytes)  # before admission: slow senders hold no place
            request = read_request(http.headers.get("content-type", ""), body)
            async with self._admitted():
                answer = await execute(request)
        except WireError as error:
            return _detail(400, str(error))
        except (Refused, BodyRefused) as refused:
            return _detail(refused.status, str(refused))
        except ClientDisconnect:
            return _detail(400, "the request was cut off")
        except (SessionUnavailable, BusError) as error:
            log.warning("call not answered", reason=str(error))
            return _detail(503, "server busy")
        content_type, body = write_answer(answer.fields, answer.images, mime=self.calls.mime)
        return Response(body, headers={"content-type": content_type})

    @asynccontextmanager
    async def _admitted(self) -> AsyncIterator[None]:
        if self._admission is None:
            yield
            return
        try:
            with anyio.fail_after(self._settings.admit_timeout):
                await self._admission.acquire()
        except TimeoutError:
            raise Refused(503, "server busy") from None
        try:
            yield
        finally:
            self._admission.release()

    def _permitted(self, http: HttpRequest) -> bool:
        if not self._settings.api_key:
            return True
        given = http.query_params.get("token") or http.headers.get("x-api-key", "")
        return hmac.compare_digest(given.encode(), self._settings.api_key.encode())


async def _expire(calls: GymCalls, session: str) -> None:
    try:
        await calls.expire(session)
    except (BusError, SessionUnavailable) as error:
        log.warning("session not closed", session=session, reason=str(error))


def _detail(status: int, detail: str) -> Response:
    return Response(json.dumps({"detail": detail}), status_code=status, media_type="application/json")
