"""Requests that are cut off when their server stops: answered in a line, instead of a traceback for each.

A server that stops lets running calls finish, within limits; what is still there then is cancelled. The client repeats
the request under its key at another gateway, and joins what still runs. Above it is uvicorn, below it an application.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import anyio
import structlog

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]

LAST_WORDS_SECONDS = 1.0
BODY = b'{"detail": "the server is stopping: ask again"}'
HEADERS = [(b"content-type", b"application/json"), (b"content-length", str(len(BODY)).encode()), (b"retry-after", b"1")]

log = structlog.get_logger()


def answer_cancelled_calls(application: Application) -> Application:
    """The application; a request that is cancelled gets a 503 if nothing of its answer went out, and a line in the log."""

    async def run(scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await application(scope, receive, send)
            return
        begun = False

        async def noted(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        try:
            await application(scope, receive, noted if scope["type"] == "http" else send)
        except anyio.get_cancelled_exc_class():
            log.warning("server is stopping; aborting the call", path=scope.get("path", ""))
            if scope["type"] == "http" and not begun:
                with anyio.move_on_after(LAST_WORDS_SECONDS, shield=True):
                    await send({"type": "http.response.start", "status": 503, "headers": HEADERS})
                    await send({"type": "http.response.body", "body": BODY})

    return run
