"""Environment servers that lie, stall, redirect or send what nobody can read: one episode's reason, never a worker's end."""

from __future__ import annotations

import base64
import io
import json
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import anyio
import anyio.abc
import httpx
import numpy as np
import pytest
from PIL import Image as Pillow
from websockets.asyncio.server import ServerConnection, serve

from fleetbus_workers.environment.adapters.mcp.client import ConnectionHost
from fleetbus_workers.environment.adapters.mcp.connection import MAX_TOOLS, ServerGone, decode_image
from fleetbus_workers.environment.adapters.mcp.http_connection import http_connection
from fleetbus_workers.environment.adapters.openenv.client import ConnectionLost, open_session
from fleetbus_workers.environment.adapters.openenv.server import OpenEnvServer
from fleetbus_workers.environment.adapters.ors.address import Address
from fleetbus_workers.environment.adapters.ors.server import OrsServer
from fleetbus_workers.environment.adapters.remote_gym.client import RemoteEnvironmentError, ServerPool, connect
from fleetbus_workers.environment.adapters.remote_gym.config import RemoteGymConfig
from fleetbus_workers.environment.base import EnvironmentFailed
from fleetbus_workers.environment.episode.stages import EpisodeEnded
from fleetbus_workers.environment.failure_location import _build_redactor
from fleetbus_workers.environment.images.observation import MAX_PIXELS, encode_image_file
from fleetbus_workers.serving.bounded_http import bound

KEY = "correct-horse-battery"
DEEP = b"[" * 2000 + b"]" * 2000

Answer = bytes | None
"""Of a raw server; None: it says nothing more."""


@asynccontextmanager
async def raw_server(answer: Callable[[bytes, bytes], Answer]) -> AsyncIterator[str]:
    """An HTTP server whose answers are bytes: ``answer`` is given the head and the body of each request."""

    async def talk(client: anyio.abc.SocketStream) -> None:
        buffer = b""
        async with client:
            try:
                while True:
                    while b"\r\n\r\n" not in buffer:
                        buffer += await client.receive()
                    head, _, buffer = buffer.partition(b"\r\n\r\n")
                    length = re.search(rb"(?i)content-length: (\d+)", head)
                    while length and len(buffer) < int(length[1]):
                        buffer += await client.receive()
                    body, buffer = (buffer[: int(length[1])], buffer[int(length[1]) :]) if length else (b"", buffer)
                    if (said := answer(head, body)) is None:
                        await anyio.sleep_forever()
                    else:
                        await client.send(said)
            except (anyio.EndOfStream, anyio.BrokenResourceError, anyio.ClosedResourceError):
                return

    with anyio.fail_after(50):
        async with await anyio.create_tcp_listener(local_host="127.0.0.1") as listener, anyio.create_task_group() as tasks:
            tasks.start_soon(listener.serve, talk)
            yield f"http://127.0.0.1:{listener.extra(anyio.abc.SocketAttribute.local_port)}"
            tasks.cancel_scope.cancel()


def say(content: Any, *, status: str = "200 OK", more: str = "") -> bytes:
    body = content if isinstance(content, bytes) else json.dumps(content).encode()
    head = f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\n{more}Content-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


# OpenEnv


@pytest.mark.parametrize(
    "pong",
    [
        '{"type":"error","data":{"code":"X","message":"m","errors":[{"loc":5}, 6]}}',
        b'{"type":"mcp","data":' + DEEP + b"}",
        b'{"type":"error","data":{"a":' + DEEP + b"}}",
        b'{"type":"mcp\xff","data":{}}',
        b'{"type":"mcp","data":{"a":"\xff"}}',
        "nonsense",
    ],
)
async def test_a_ping_whose_answer_nobody_can_read_ends_no_other_session(pong: str | bytes) -> None:
    answered = anyio.Event()

    async def talk(socket: ServerConnection) -> None:
        async for frame in socket:
            is_ping = json.loads(frame).get("data", {}).get("method") == "ping"
            await socket.send(pong if is_ping else '{"type":"state","data":{}}')
            if is_ping:
                answered.set()

    async with serve(talk, "127.0.0.1", 0) as double:
        server = OpenEnvServer(f"http://127.0.0.1:{next(iter(double.sockets)).getsockname()[1]}", keep_alive=0.1)
        with anyio.fail_after(50):
            async with server.run():
                session = await server.open_session()
                await answered.wait()
                other = await server.open_session()
                assert await other.state() == {}
                await server.close_session(other)
                await server.close_session(session)


@pytest.mark.parametrize("second", ["observation", "error"])
async def test_a_reply_too_many_is_not_taken_for_that_to_the_next_call(second: str) -> None:
    """Else every reward would be that of the step before, or an action refused that was never sent."""

    async def talk(socket: ServerConnection) -> None:
        async for frame in socket:
            kind = {"state": "state"}.get(json.loads(frame)["type"], "observation")
            for each in [kind] if kind == "state" else [kind, second]:
                data = {"observation": {}, "reward": 1.0, "code": "VALIDATION_ERROR"}
                await socket.send(json.dumps({"type": each, "data": data}))

    async with serve(talk, "127.0.0.1", 0) as double:
        with anyio.fail_after(50):
            session = await open_session(f"ws://127.0.0.1:{next(iter(double.sockets)).getsockname()[1]}/ws")
            assert (await session.step({})).reward == 1.0
            await (await session._socket.ping())  # its answer comes behind the second reply
            with pytest.raises(ConnectionLost, match="was not asked"):
                await session.step({})
            await session.close()


async def test_a_server_that_sends_its_clients_elsewhere_is_not_followed() -> None:
    visited = []
    async with raw_server(lambda head, _: visited.append(head) or say({})) as elsewhere:  # type: ignore[func-returns-value]
        place = f"Location: ws{elsewhere.removeprefix('http')}/ws\r\n"
        async with raw_server(lambda _head, _body: say(b"", status="307 Moved", more=place)) as url:
            with pytest.raises(ConnectionLost, match="307"):
                await open_session(f"ws{url.removeprefix('http')}/ws", headers={"Authorization": f"Bearer {KEY}"})
    assert not visited


# Remote gyms


@pytest.mark.parametrize("session_id", ["", "a b", "a\r\nX: y", "\ud800", "x" * 300, 5, None])
async def test_a_session_id_that_no_journal_can_keep_is_no_session(session_id: object) -> None:
    pool = ServerPool()
    async with raw_server(lambda *_: say({"session_id": session_id, "obs": "o"})) as url, pool.run():
        with pytest.raises(RemoteEnvironmentError, match="no session_id of up to"):
            await connect(pool, RemoteGymConfig(base_urls=(url,)), {}, 0)


async def test_a_server_that_is_busy_for_good_keeps_nobody_from_another_one() -> None:
    pool = ServerPool()
    async with (
        raw_server(lambda *_: say(b"", status="503 Busy")) as full,
        raw_server(lambda *_: say({"session_id": "s", "obs": "o"})) as free,
        pool.run(),
        anyio.create_task_group() as tasks,
    ):
        for _ in range(3):
            tasks.start_soon(connect, pool, RemoteGymConfig(base_urls=(full,), backoff=0.01, log_retries=False), {}, 0)
        await anyio.sleep(0.1)
        with anyio.fail_after(5):
            session, _ = await connect(pool, RemoteGymConfig(base_urls=(free,)), {}, 0)
        assert session.id == "s"
        tasks.cancel_scope.cancel()


async def test_a_key_that_a_server_quotes_is_not_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GYM_API_KEY", KEY)
    _build_redactor.cache_clear()
    pool = ServerPool()
    try:
        quoted = say(f"X-API-Key: {KEY}".encode(), status="500 Broken")
        async with raw_server(lambda *_: quoted) as url, pool.run():
            with pytest.raises(RemoteEnvironmentError) as told:
                await connect(pool, RemoteGymConfig(base_urls=(url,), retries=0, token=KEY), {}, 0)
        ended = EpisodeEnded("env_failed", "MCPError", f"the server says: {KEY} is no key")
    finally:
        _build_redactor.cache_clear()
    assert "500" in str(told.value) and KEY not in str(told.value)
    assert "is no key" in ended.error and KEY not in f"{ended.error} {ended}"


# MCP


@asynccontextmanager
async def mcp_server(**answers: bytes | Callable[[Any], bytes]) -> AsyncIterator[Any]:
    """A connection to a server of the older protocol; ``answers`` by method, `/` as `_`, to be given the request's id."""
    tool = {"name": "count", "inputSchema": {"type": "object"}}
    results = {
        "initialize": {
            "protocolVersion": "2025-06-18",
            "capabilities": {"tools": {}},
            "serverInfo": {"name": "x", "version": "1"},
        },
        "tools/list": {"tools": [tool]},
    }

    def answer(head: bytes, body: bytes) -> bytes:
        asked = json.loads(body) if body else {}
        method = asked.get("method", "")
        if given := answers.get(method.replace("/", "_")):
            return given(asked["id"]) if callable(given) else given
        if method in results:
            return say({"jsonrpc": "2.0", "id": asked["id"], "result": results[method]})
        if "id" in asked:
            return say({"jsonrpc": "2.0", "id": asked["id"], "error": {"code": -32601, "message": "no such method"}})
        return say(b"", status="202 Accepted" if method else "405 No")

    host = ConnectionHost()
    async with raw_server(answer) as url, host.run():
        connection = http_connection(f"{url}/mcp", host, call_seconds=10)
        await connection.open()
        yield connection
        await connection.close()


async def test_a_listing_that_goes_on_and_on_is_refused_before_it_fills_the_memory() -> None:
    asked = []

    def list_tools(number: object) -> bytes:
        asked.append(number)
        tools = [{"name": f"tool-{index}", "inputSchema": {"type": "object"}} for index in range(MAX_TOOLS // 2)]
        return say({"jsonrpc": "2.0", "id": number, "result": {"tools": tools, "nextCursor": "more"}})

    async with mcp_server(tools_list=list_tools) as connection:
        with pytest.raises(EnvironmentFailed, match=f"more than {MAX_TOOLS} tools"):
            await connection.list_tools()
    assert len(asked) == 3


async def test_a_server_that_has_moved_is_gone_and_no_tool_error() -> None:
    async with mcp_server(tools_call=say(b"", status="307 Moved", more="Location: http://127.0.0.2/\r\n")) as connection:
        with pytest.raises(ServerGone, match="HTTP 307"):
            await connection.call_tool("count", {})


# Images


def test_an_image_is_what_its_bytes_say_and_not_what_its_sender_calls_it() -> None:
    png = encode_image_file(np.zeros((2, 2), np.uint8)).data
    encoded = base64.b64encode(png).decode()
    image = decode_image({"data": encoded, "mimeType": "text/html\r\nX: y"})
    assert image is not None and image.media_type == "image/png"
    assert decode_image({"data": "JSFQUy1BZG9iZS0zLjA=", "mimeType": "image/png"}) is None


def test_no_program_is_started_to_read_an_image(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pillow gives PostScript to Ghostscript."""
    from PIL import EpsImagePlugin

    monkeypatch.setattr(EpsImagePlugin, "Ghostscript", lambda *_, **__: pytest.fail("a program was started"))
    postscript = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n%%EOF\n"
    with pytest.raises(ValueError, match="cannot be read"):
        encode_image_file(postscript)


def test_an_image_of_more_pixels_than_a_large_screen_has_is_refused_before_it_is_decoded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A small file can be a large image."""
    file = io.BytesIO()
    Pillow.new("1", (4097, 4096)).save(file, "PNG")
    monkeypatch.setattr(Pillow.Image, "convert", lambda *_: pytest.fail("it was decoded"))
    with pytest.raises(ValueError, match="4097x4096 pixels is too large"):
        encode_image_file(file.getvalue())
    assert MAX_PIXELS >= 5120 * 2880


# HTTP of the other adapters


@pytest.mark.parametrize("place", ["x:y", "http://xn--a", "/" + "a" * 65530])
async def test_a_ping_that_is_sent_to_no_address_ends_no_other_session(place: str) -> None:
    """httpx reads the address of a redirect that nobody follows, and raises what is no error of HTTP."""
    pinged = anyio.Event()

    def answer(head: bytes, _: bytes) -> bytes:
        if head.startswith(b"POST /ping"):
            pinged.set()
            return b"HTTP/1.1 302 Found\r\nLocation: " + place.encode() + b"\r\nContent-Length: 0\r\n\r\n"
        return say({"sid": "s"} if b"/create" in head else ["order"], more="Set-Cookie: a=b\r\n")

    async with raw_server(answer) as url:
        server = OrsServer(Address(url), ping_seconds=0.05)
        async with server.run():
            session = await server.name_session()
            await session.create("train", 0)
            await pinged.wait()
            await anyio.sleep(0.2)
            await session.create("train", 0)
            await server.close_session(session)


async def test_no_cookie_of_one_session_is_sent_in_another() -> None:
    heads = []

    def answer(head: bytes, _: bytes) -> bytes:
        heads.append(head.lower())
        return say({"sid": "s"} if b"/create" in head else ["order"], more=f"Set-Cookie: c{len(heads)}={'x' * 4000}\r\n")

    async with raw_server(answer) as url:
        server = OrsServer(Address(url))
        async with server.run():
            for _ in range(2):
                await server.close_session(await server.name_session())
    assert len(heads) > 4 and not any(b"\r\ncookie:" in head for head in heads)


@pytest.mark.parametrize("codec", ["punycode", "idna", "zlib", "rot13"])
async def test_an_answer_is_read_as_utf_8_whatever_codec_it_names(codec: str) -> None:
    """A few hundred kilobytes as punycode take minutes, in which no other episode goes on."""
    text = "a" * 1_000_000 + "\xfc"
    head = f"HTTP/1.1 200 OK\r\nContent-Type: text/plain; charset={codec}\r\nContent-Length: {len(text.encode())}\r\n\r\n"
    async with raw_server(lambda _head, _body: head.encode() + text.encode()) as url:
        async with httpx.AsyncClient(event_hooks=bound(httpx)) as client:
            answer = await client.get(url)
    assert answer.text == text
