"""Answers to calls of agents over HTTP: as JSON, as server-sent events, or refused in the caller's protocol.

A streamed answer begins when there is something to say. Clients repeat a call whose connection broke before an answer began,
and few of them one that broke later: so a gateway that dies meanwhile, or loses the session, costs its clients a repetition and
no more (docs/decisions/0235-an-answer-begins-when-it-is-there.md). Below: `sessions`. Above: `endpoint`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

import anyio
import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from fleetbus.concurrency.task_groups import open_first_error_task_group
from fleetbus_workers.environment.adapters.agent.dialects.base import AgentCall, Dialect, InvalidCall
from fleetbus_workers.environment.adapters.agent.models import MODEL
from fleetbus_workers.environment.adapters.agent.sessions import (
    AgentSession,
    KeyRefused,
    PendingCall,
    SessionMoved,
    TooManyCalls,
)

BEGIN_SECONDS = 50.0
"""Until a stream begins whose answer is not there: proxies take a server that says nothing for a minute for dead."""

KEEPALIVE_SECONDS = 10.0
RETRY_SECONDS = "1"

REFUSALS = (KeyRefused, SessionMoved, TooManyCalls)


def get_status(refused: Exception) -> int:
    return next(
        status for kind, status in ((KeyRefused, 401), (SessionMoved, 503), (TooManyCalls, 429)) if isinstance(refused, kind)
    )


async def answer_refusal(request: Request, refused: Exception) -> Response:
    status = get_status(refused)
    return JSONResponse({"detail": str(refused)}, status, headers={"Retry-After": RETRY_SECONDS} if status != 401 else {})


def refuse(dialect: Dialect, status: int, message: str, code: str = "") -> Response:
    headers = {"Retry-After": RETRY_SECONDS} if status in (429, 503) else {}
    return JSONResponse(dialect.render_error(status, message, code), status, headers=headers)


def write_failure(dialect: Dialect, status: int, failure: Exception) -> bytes:
    """The end of a stream that has begun."""
    return dialect.FAILURE_HEAD + msgspec.json.encode(dialect.render_error(status, str(failure))) + b"\n\n"


class StreamedAnswer(StreamingResponse):
    """Counts as a request of its session until its client has all of it, or is gone."""

    def __init__(self, session: AgentSession, dialect: Dialect, call: AgentCall, pending: PendingCall) -> None:
        events = stream_answer(dialect, call, pending)
        super().__init__(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        self._session = session
        self._dialect = dialect
        self._pending = pending

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._session.requests += 1
        try:
            async with self._pending.hold_request():
                if (refused := await self._begin(Request(scope, receive))) is not None:
                    await refused(scope, receive, send)
                else:
                    await super().__call__(scope, receive, send)
        finally:
            self._session.requests -= 1

    async def _begin(self, request: Request) -> Response | None:
        """Wait for the answer, or as long as its client may wait for a beginning; a refusal that comes instead."""
        gone: Response | None = Response(status_code=499)
        async with open_first_error_task_group() as group:
            group.start_soon(cancel_when_disconnected, request, group.cancel_scope)
            try:
                with anyio.move_on_after(BEGIN_SECONDS):
                    await self._pending.wait()
                gone = None
            except InvalidCall as invalid:
                gone = refuse(self._dialect, 400, str(invalid), invalid.code)
            except SessionMoved as moved:
                gone = refuse(self._dialect, 503, str(moved))
            group.cancel_scope.cancel()
        return gone


async def wait_for_answer(dialect: Dialect, call: AgentCall, pending: PendingCall, request: Request) -> Response:
    """The answer as JSON, unless its client goes away."""
    async with pending.hold_request(), open_first_error_task_group() as group:
        group.start_soon(cancel_when_disconnected, request, group.cancel_scope)
        answer = await pending.wait()
        group.cancel_scope.cancel()
        pending.delivered = True
        return JSONResponse(dialect.render(answer, call.model or MODEL))
    return Response(status_code=499)


async def cancel_when_disconnected(request: Request, scope: anyio.CancelScope) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
    scope.cancel()


async def stream_answer(dialect: Dialect, call: AgentCall, pending: PendingCall) -> AsyncIterator[bytes]:
    """The answer as server-sent events, with events that clients skip while it is awaited."""
    while True:
        try:
            with anyio.move_on_after(KEEPALIVE_SECONDS):
                answer = await pending.wait()
                break
        except InvalidCall as invalid:
            yield write_failure(dialect, 400, invalid)
            return
        except SessionMoved as moved:
            yield write_failure(dialect, 503, moved)
            return
        yield dialect.KEEPALIVE
    *events, last = dialect.stream(answer, call.model or MODEL, usage=call.stream_usage)
    for event in events:
        yield event
    pending.delivered = True  # a client may close as soon as it has the last event
    yield last
