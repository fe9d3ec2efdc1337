"""Connections that ask nothing, too slowly, too much, or do not take their answers: each is cut while others are served."""

from __future__ import annotations

import resource
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import anyio
import httpx
import psutil
import pytest
from anyio.abc import SocketStream
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from fleetbus_workers.serving import protocol_choice
from fleetbus_workers.serving.connections import Bounds
from fleetbus_workers.serving.protocol_choice import OTHER_FILES, H11BoundedProtocol, reserve_descriptors
from tests.support.gym_service import Wire, running

LARGE = 64 << 20
PARTIAL = b"GET / HTTP/1.1\r\nHost: x\r\n"


@pytest.fixture(params=["h11", "httptools"], autouse=True)
def _parser(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "h11":
        monkeypatch.setattr(protocol_choice, "find_protocol", lambda: H11BoundedProtocol)
    else:
        pytest.importorskip("httptools")


async def answer_small(request: Request) -> Response:
    return PlainTextResponse("hello")


async def answer_large(request: Request) -> Response:
    return PlainTextResponse(b"x" * LARGE)


class BoundedServer(Wire):
    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    async def connect_raw(self) -> SocketStream:
        return await anyio.connect_tcp("127.0.0.1", self.port)

    async def check_answers(self) -> None:
        """Somebody else, on a new connection, is served."""
        async with httpx.AsyncClient() as client:
            assert (await client.get(self.url)).text == "hello"

    def open(self) -> int:
        """Connections that the server has not closed."""
        own = psutil.Process().net_connections("tcp")
        return sum(1 for each in own if each.laddr.port == self.port and each.status in ("ESTABLISHED", "CLOSE_WAIT"))

    async def wait_until_all_closed(self) -> None:
        while self.open():  # noqa: ASYNC110 - sockets of the kernel, which nobody tells about
            await anyio.sleep(0.05)


@asynccontextmanager
async def server(**bounds: float) -> AsyncIterator[BoundedServer]:
    application = Starlette(routes=[Route("/", answer_small, methods=["GET", "POST"]), Route("/large", answer_large)])
    limits = Bounds(**bounds)  # type: ignore[arg-type]
    async with running(application, bounds=limits) as wire, httpx.AsyncClient() as client:
        yield BoundedServer(client, wire.url)


async def read_until_closed(stream: SocketStream) -> bytes:
    """What came until the server ended the connection."""
    received = bytearray()
    while True:
        try:
            received += await stream.receive()
        except (anyio.EndOfStream, anyio.BrokenResourceError):
            return bytes(received)


async def test_heads_that_trickle_in_are_cut_however_busily_they_trickle() -> None:
    async with server(head_seconds=0.5) as here, anyio.create_task_group() as group:
        cut = 0

        async def send_slowly() -> None:
            nonlocal cut
            async with await here.connect_raw() as stream:
                await stream.send(PARTIAL)
                while True:
                    try:
                        await stream.send(b"X-More: 1\r\n")
                        with anyio.move_on_after(0.05):
                            await stream.receive()
                    except (anyio.EndOfStream, anyio.BrokenResourceError):
                        cut += 1
                        return

        for _ in range(20):
            group.start_soon(send_slowly)
        await here.check_answers()
        await here.wait_until_all_closed()
        while cut < 20:  # noqa: ASYNC110 - the clients see it a moment later
            await anyio.sleep(0.01)


async def test_a_connection_that_never_asks_is_cut() -> None:
    async with server(head_seconds=0.2) as here, await here.connect_raw() as stream:
        assert await read_until_closed(stream) == b""


async def test_the_second_head_of_a_connection_has_the_same_limit() -> None:
    async with server(head_seconds=0.5) as here, await here.connect_raw() as stream:
        await stream.send(PARTIAL + b"\r\n")
        while not (await stream.receive()).endswith(b"hello"):
            pass
        await stream.send(PARTIAL)
        assert await read_until_closed(stream) == b""


@pytest.mark.integration
async def test_a_connection_between_two_requests_is_not_cut_by_the_limit_of_heads() -> None:
    async with server(head_seconds=0.3) as here, httpx.AsyncClient() as client:
        port = None
        for _ in range(2):
            response = await client.get(here.url)
            used = response.extensions["network_stream"].get_extra_info("client_addr")
            assert port in (None, used), "the same connection"
            port = used
            await anyio.sleep(0.6)


async def test_a_body_that_goes_on_after_the_answer_is_cut() -> None:
    head = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\n"
    async with server(head_seconds=0.5) as here, await here.connect_raw() as stream:
        await stream.send(head)
        received = b""
        while True:
            try:
                await stream.send(b"{")
                with anyio.move_on_after(0.05):
                    received += await stream.receive()
            except (anyio.EndOfStream, anyio.BrokenResourceError):
                break
        assert received.endswith(b"hello")
        await here.wait_until_all_closed()


async def test_an_answer_that_nobody_takes_is_given_up() -> None:
    async with server(send_seconds=0.5) as here, await here.connect_raw() as stream:
        stream.extra(anyio.abc.SocketAttribute.raw_socket).setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        await stream.send(b"GET /large HTTP/1.1\r\nHost: x\r\n\r\n")
        await here.check_answers()
        await here.wait_until_all_closed()


async def test_an_answer_that_is_taken_is_not_cut() -> None:
    async with server(send_seconds=5) as here, httpx.AsyncClient() as client:
        assert len((await client.get(f"{here.url}/large")).content) == LARGE


@pytest.mark.parametrize(
    "sent",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\nX-Large: " + b"x" * (1 << 20),
        b"GET / HTTP/1.1\r\nHost: x\r\n" + b"X-Large: 1\r\n" * 30_000 + b"\r\n",
        b"GET /" + b"x" * (1 << 20),
        b"".join(b"X-%d: 1\r\n" % number for number in range(100_000)),
        b"\x16\x03\x01\x02\x00" + bytes(512),
        b"\r\n" * 100_000 + b"nonsense\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzzz\r\n",
        b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n12345",
    ],
    ids=[
        "long header",
        "long head",
        "long target",
        "many headers",
        "TLS",
        "blank lines",
        "bad chunk",
        "bad length",
        "two lengths",
    ],
)
async def test_what_is_no_request_is_refused_and_closed(sent: bytes) -> None:
    async with server(head_seconds=2) as here, await here.connect_raw() as stream:
        received = b""
        try:
            await stream.send(sent)
        except anyio.BrokenResourceError:
            pass
        received = await read_until_closed(stream)
        assert b"200 OK" not in received or b"chunked" in sent
        await here.wait_until_all_closed()
        await here.check_answers()


async def test_garbage_behind_a_request_ends_the_connection_after_its_answer() -> None:
    async with server() as here, await here.connect_raw() as stream:
        await stream.send(PARTIAL + b"\r\n" + b"\x00\x01 garbage\r\n\r\n")
        received = await read_until_closed(stream)
        assert received.startswith(b"HTTP/1.1 200")
        assert received.count(b"HTTP/1.1 400") == 1
        await here.wait_until_all_closed()


async def test_requests_in_one_piece_are_answered_in_order_and_all() -> None:
    async with server() as here, await here.connect_raw() as stream:
        await stream.send((PARTIAL + b"\r\n") * 500)
        received = b""
        while received.count(b"hello") < 500:
            received += await stream.receive()


async def test_no_more_requests_are_read_ahead_than_memory_allows() -> None:
    pytest.importorskip("httptools")
    if protocol_choice.find_protocol() is H11BoundedProtocol:
        pytest.skip("h11 reads one request at a time")
    async with server() as here, await here.connect_raw() as stream:
        await stream.send((PARTIAL + b"\r\n") * 4000)
        received = await read_until_closed(stream)
        assert 1000 <= received.count(b"HTTP/1.1 200") <= 1100
        assert received.count(b"HTTP/1.1 400") == 1
        await here.check_answers()


@pytest.mark.parametrize("then", [b"", b"\r\n", b"POST / HTTP/1.1\r\nX: "], ids=["nothing", "blank lines", "half a head"])
async def test_what_follows_a_body_that_ended_after_the_answer_has_the_limit_of_a_head(then: bytes) -> None:
    async with server(head_seconds=0.3) as here, await here.connect_raw() as stream:
        await stream.send(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\n1234")
        while not (await stream.receive()).endswith(b"hello"):
            pass
        await stream.send(b"5" + then)
        if not then:
            await anyio.sleep(0.6)
            await stream.send(PARTIAL + b"\r\n")
            assert (await stream.receive()).startswith(b"HTTP/1.1 200")
            return
        await anyio.sleep(0.1)
        await stream.send(then[-2:])
        assert b"200" not in await read_until_closed(stream)


async def test_where_all_places_are_taken_who_waits_longest_makes_room() -> None:
    async with server(connections=20) as here, AsyncExitStack() as stack:
        streams = [await stack.enter_async_context(await here.connect_raw()) for _ in range(60)]
        await here.check_answers()
        assert here.open() <= 20
        assert await read_until_closed(streams[0]) == b""
        await streams[-1].send(PARTIAL + b"\r\n")
        assert (await streams[-1].receive()).startswith(b"HTTP/1.1 200")


def test_a_process_asks_for_the_files_that_its_connections_take(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 3000))
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: asked.append(limits))
    assert reserve_descriptors(500) == 500
    assert asked == []
    assert reserve_descriptors(2000) == 2000
    assert reserve_descriptors(9000) == 3000 - OTHER_FILES, "no more connections than files"
    assert asked == [(2000 + OTHER_FILES, 3000), (3000, 3000)]
