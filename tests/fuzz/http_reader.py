"""Bytes of a client as they reach the HTTP servers of gateways, agents and the page: heads, bodies, WebSockets, their readers.

The first byte of an input chooses the parser (its lowest bit) and how many bytes arrive at a time; the rest is what is sent.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Iterator
from functools import cache
from typing import Any

import uvicorn
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route, WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect
from uvicorn.server import ServerState

from fleetbus_workers.environment.adapters.agent.dialects import chat_completions
from fleetbus_workers.environment.adapters.agent.dialects.base import InvalidCall
from fleetbus_workers.environment.adapters.agent.endpoint import build_application, parse_call, read_keys
from fleetbus_workers.gateway.gym_wire import WireError, read_request
from fleetbus_workers.gateway.openenv_frames import FrameError, read_frame
from fleetbus_workers.serving import protocol_choice
from fleetbus_workers.serving.browser_guard import GuardSettings
from fleetbus_workers.serving.quick_connections import QuickProtocol
from fleetbus_workers.serving.request_body import read_body
from fleetbus_workers.serving.serve import BOUNDS, answer_cancelled_calls
from fleetbus_workers.serving.web_sockets import build_bounded_socket

MAX_BYTES = 100_000
"""Heads beyond 64 KiB are refused."""

PARSERS = (QuickProtocol, protocol_choice.H11BoundedProtocol)
SIZES = (1 << 20, 1, 7, 64, 1024)
TURNS = 400
"""Of the loop, after which no request may be open whose client is gone."""

BOUNDARY = b"b" * 28
FORM = b'Content-Disposition: form-data; name="data"\r\nContent-Type: application/json\r\n\r\n{"a": 1}'
IMAGE = b'Content-Disposition: form-data; name="images"; filename="0.png"\r\n\r\nx'
MULTIPART = b"".join(b"--%s\r\n%s\r\n" % (BOUNDARY, part) for part in (FORM, IMAGE)) + b"--%s--\r\n" % BOUNDARY


class Transport(asyncio.Transport):
    """A connection whose client takes all that is written."""

    def __init__(self, protocol: Any) -> None:
        super().__init__({"peername": ("127.0.0.1", 1), "sockname": ("127.0.0.1", 2)})
        self.protocol, self.closing, self.written = protocol, False, 0

    def get_protocol(self) -> Any:
        return self.protocol

    def set_protocol(self, protocol: Any) -> None:
        self.protocol = protocol

    def is_closing(self) -> bool:
        return self.closing

    def write(self, data: Any) -> None:
        self.written += len(data)

    def close(self) -> None:
        self.closing = True

    abort = close

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...


async def take_call(request: Request) -> Response:
    """A call of an agent."""
    try:
        read_keys(request)
        parse_call(chat_completions, await read_body(request, limit=1 << 16), {})
    except InvalidCall as invalid:
        return JSONResponse({"detail": str(invalid)}, 400)
    return StreamingResponse(stream())


async def stream() -> AsyncIterator[bytes]:
    """An answer in two pieces, without a thread."""
    yield b"a"
    yield b"b"


async def take_gym(request: Request) -> Response:
    """A call of a trainer."""
    try:
        return JSONResponse(len(read_request(request.headers.get("content-type", ""), await read_body(request)).fields))
    except WireError as error:
        return JSONResponse({"detail": str(error)}, 400)


async def take_socket(socket: WebSocket) -> None:
    """A session over a WebSocket."""
    await socket.accept()
    try:
        while True:
            message = await socket.receive()
            if message["type"] == "websocket.disconnect":
                return
            try:
                await socket.send_json(read_frame(message.get("text"))[0])
            except FrameError as error:
                await socket.send_json({"code": error.code})
    except WebSocketDisconnect:
        return


class Server:
    """One event loop and one application for all inputs; ``errors`` is what neither of them caught."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.loop.set_exception_handler(lambda loop, context: self.errors.append(context.get("exception") or context))
        self.errors: list[Any] = []
        routes = [
            Route("/v1/chat/completions", take_call, methods=["POST"]),
            Route("/call", take_gym, methods=["POST"]),
            WebSocketRoute("/ws", take_socket),
        ]
        application = build_application(routes, GuardSettings(loopback=True))

        async def watched(scope: Any, receive: Any, send: Any) -> None:
            try:
                await answer_cancelled_calls(application)(scope, receive, send)
            except Exception as error:
                self.errors.append(error)
                raise

        self.config = uvicorn.Config(
            watched, log_config=None, lifespan="off", ws=build_bounded_socket(BOUNDS), ws_per_message_deflate=False
        )

    def take(self, data: bytes) -> None:
        """One connection, from its beginning to its end."""
        self.errors.clear()
        self.loop.run_until_complete(self._take(data[0] if data else 0, data[1:]))
        for error in self.errors:
            raise error if isinstance(error, BaseException) else AssertionError(error)

    async def _take(self, choice: int, data: bytes) -> None:
        state = ServerState()
        protocol = build_protocols()[choice & 1](config=self.config, server_state=state, app_state={}, _loop=self.loop)
        transport = Transport(protocol)
        protocol.connection_made(transport)
        size = SIZES[(choice >> 1) % len(SIZES)]
        for start in range(0, min(len(data), size * 4096), size):
            if transport.closing:
                break
            transport.protocol.data_received(data[start : start + size])
            await asyncio.sleep(0)
        for _ in range(20):
            if transport.closing or not state.tasks:
                break
            await asyncio.sleep(0)
        if not transport.closing:
            transport.protocol.eof_received()
        transport.protocol.connection_lost(None)
        for _ in range(TURNS):
            if not state.tasks:
                break
            await asyncio.sleep(0)
        left = len(state.tasks)
        for task in state.tasks:
            task.cancel()
        assert not left, f"{left} requests stay open whose client is gone"


@cache
def build_protocols() -> list[Any]:
    """The protocols with limits of their own."""
    return [type(parser.__name__, (parser,), {"bounds": BOUNDS, "waiting": OrderedDict()}) for parser in PARSERS]


@cache
def start_server() -> Server:
    return Server()


def run(data: bytes) -> None:
    """Take one connection."""
    start_server().take(data)


def list_seeds() -> Iterator[bytes]:
    """Requests as clients send them, to both parsers, whole and in pieces."""
    body = b'{"model": "m", "messages": [{"role": "user", "content": "u"}]}'
    head = b"Host: localhost\r\nContent-Type: application/json\r\nAuthorization: Bearer k\r\n"
    chunks = b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in (body[:9], body[9:])) + b"0\r\n\r\n"
    boundary = b"Content-Type: multipart/form-data; boundary=%s\r\n" % BOUNDARY
    sent = [
        b"POST /v1/chat/completions HTTP/1.1\r\n" + head + b"Content-Length: %d\r\n\r\n" % len(body) + body,
        b"POST /v1/chat/completions HTTP/1.1\r\n"
        + head
        + b"Transfer-Encoding: chunked\r\nExpect: 100-continue\r\n\r\n"
        + chunks,
        b"POST /call HTTP/1.1\r\nHost: localhost\r\n" + boundary + b"Content-Length: %d\r\n\r\n" % len(MULTIPART) + MULTIPART,
        b"GET /a%2f?b=%zz HTTP/1.0\r\nHost: 127.0.0.1\r\nConnection: keep-alive\r\n\r\n"
        b"GET / HTTP/1.1\r\nHost: [::1]:80\r\nOrigin: http://x\r\n\r\n",
        b"GET /ws HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
        b"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
        + b"\x81\x92\0\0\0\0"
        + b'{"type": "state"} '
        + b"\x89\x80\0\0\0\0\x01\x81\0\0\0\0{\x80\x81\0\0\0\0}\x88\x82\0\0\0\0\x03\xe8",
    ]
    for choice in range(4):
        yield from (bytes([choice]) + each for each in sent)
