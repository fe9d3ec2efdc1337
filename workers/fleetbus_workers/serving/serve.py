"""Serves an ASGI application until a stop event; running requests are then finished, within limits."""

import socket
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import anyio
import structlog
import uvicorn

from fleetbus_workers.serving.connections import Bounds
from fleetbus_workers.serving.listeners import SignalFreeServer
from fleetbus_workers.serving.protocol_choice import build_bounded_protocol
from fleetbus_workers.serving.web_sockets import build_bounded_socket

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]

LAST_WORDS_SECONDS = 1.0
BODY = b'{"detail": "the server is stopping: ask again"}'
HEADERS = [(b"content-type", b"application/json"), (b"content-length", str(len(BODY)).encode()), (b"retry-after", b"1")]

log = structlog.get_logger()


def answer_cancelled_calls(application: Application) -> Application:
    """The application; a request that is cancelled, as the server stops, gets a 503 if nothing of its answer went out, and a
    line in the log. Its client repeats it under its key at another gateway, and joins what still runs."""

    async def run(scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await application(scope, receive, send)
            return
        begun = False

        async def note_and_send(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        try:
            await application(scope, receive, note_and_send if scope["type"] == "http" else send)
        except anyio.get_cancelled_exc_class():
            log.warning("server is stopping; aborting the call", path=scope.get("path", ""))
            if scope["type"] == "http" and not begun:
                with anyio.move_on_after(LAST_WORDS_SECONDS, shield=True):
                    await send({"type": "http.response.start", "status": 503, "headers": HEADERS})
                    await send({"type": "http.response.body", "body": BODY})

    return run


KEEP_ALIVE_SECONDS = 75
"""Longer than clients keep an idle connection, so that none is closed under a request."""

GRACE_SECONDS = 10
PING_SECONDS = 10.0
"""A WebSocket whose client does not answer a ping for this long is cut."""

MAX_FRAME_BYTES = 16 << 20
BOUNDS = Bounds()


async def serve(application: Any, listener: socket.socket, stop: anyio.Event, *, bounds: Bounds = BOUNDS) -> None:
    """Serve on a bound socket until ``stop``; the socket is closed at the end. Where all connections that ``bounds`` allows are
    in use, a further one gets a 503."""
    protocol = build_bounded_protocol(bounds)
    configuration = uvicorn.Config(
        answer_cancelled_calls(application),
        log_config=None,
        access_log=False,
        lifespan="on",
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=GRACE_SECONDS,
        http=protocol,
        ws=build_bounded_socket(bounds),
        limit_concurrency=protocol.bounds.connections,
        proxy_headers=False,
        ws_ping_interval=PING_SECONDS,
        ws_ping_timeout=PING_SECONDS,
        ws_max_size=MAX_FRAME_BYTES,
        ws_per_message_deflate=False,  # what goes over loopback, and images, are not worth the CPU and memory per connection
        server_header=False,
    )
    server = SignalFreeServer(configuration)
    with listener:
        async with anyio.create_task_group() as group:

            async def stop_on_request() -> None:
                await stop.wait()
                server.should_exit = True

            group.start_soon(stop_on_request)
            await server.serve(sockets=[listener])
            group.cancel_scope.cancel()
    if not server.started:
        raise RuntimeError("the application did not start")
