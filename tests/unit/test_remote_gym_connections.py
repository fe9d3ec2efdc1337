"""Connections to remote-gym servers: kept while they serve, never used when closed, and bounded in what they read."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager

import anyio
import anyio.abc
import pytest

from fleetbus_workers.environment.adapters.remote_gym import connections
from fleetbus_workers.environment.adapters.remote_gym.connections import Answer, Connections, NoAnswer, NotConnected, find_proxy
from tests.support.backends import asyncio_alone

OK = b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nContent-Length: 2\r\n\r\nok"

pytestmark = pytest.mark.anyio

anyio_backend = asyncio_alone


class Server:
    """Answers each request with the next of ``answers``, the last of them again and again; ``then_close``: and goes away."""

    def __init__(self, *answers: bytes, then_close: bool = False) -> None:
        self._answers = list(answers)
        self._then_close = then_close
        self.connections = 0
        self.requests: list[bytes] = []
        self.closed = anyio.Event()
        self.url = ""

    async def serve(self, client: anyio.abc.SocketStream) -> None:
        self.connections += 1
        async with client:
            try:
                while True:
                    self.requests.append(await client.receive())
                    answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
                    if answer:
                        await client.send(answer)
                    if self._then_close:
                        break
            except (anyio.EndOfStream, anyio.BrokenResourceError):
                pass
        self.closed.set()


@asynccontextmanager
async def running(server: Server) -> AsyncIterator[Callable[..., Coroutine[None, None, Answer]]]:
    pool = Connections(max_bytes=1000)
    async with (
        pool.run(),
        await anyio.create_tcp_listener(local_host="127.0.0.1") as listener,
        anyio.create_task_group() as tasks,
    ):
        port = listener.extra(anyio.abc.SocketAttribute.local_port)
        server.url = f"http://127.0.0.1:{port}/call"
        tasks.start_soon(listener.serve, server.serve)

        async def post(body: bytes = b"x", timeout: float = 5.0, **headers: str) -> Answer:
            return await pool.ask("POST", server.url, headers, body=body, timeout=timeout)

        with anyio.fail_after(20):
            yield post
        tasks.cancel_scope.cancel()


async def test_calls_after_each_other_share_a_connection() -> None:
    server = Server(OK)
    async with running(server) as post:
        assert [await post() for _ in range(3)] == [Answer(200, "text/plain", b"ok")] * 3
    assert server.connections == 1
    head = server.requests[0].split(b"\r\n")
    assert head[0] == b"POST /call HTTP/1.1"
    assert b"Content-Length: 1" in head


async def test_calls_at_the_same_time_have_a_connection_each() -> None:
    server = Server(OK)
    async with running(server) as post, anyio.create_task_group() as tasks:
        for _ in range(3):
            tasks.start_soon(post)
    assert server.connections == 3


async def test_a_connection_that_the_server_closed_while_idle_is_not_used_for_a_call() -> None:
    server = Server(OK, then_close=True)
    async with running(server) as post:
        await post()
        await server.closed.wait()
        await anyio.wait_all_tasks_blocked()
        await post()
    assert server.connections == 2


async def test_a_connection_that_was_idle_for_long_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "KEEP_ALIVE_SECONDS", 0.0)
    server = Server(OK)
    async with running(server) as post:
        await post()
        await post()
    assert server.connections == 2


async def test_a_connection_is_not_used_again_after_a_call_that_failed_or_was_cancelled() -> None:
    server = Server(OK, b"", OK)
    async with running(server) as post:
        await post()
        with pytest.raises(NoAnswer, match=r"nothing for 0\.05 s"):
            await post(timeout=0.05)  # on the connection that is there
        await post()
        with anyio.CancelScope() as scope:
            scope.cancel()
            await post()
        await post()
    assert server.connections >= 2


async def test_an_answer_may_end_with_its_connection_come_in_chunks_or_be_announced() -> None:
    ends = b"HTTP/1.1 200 OK\r\nContent-Type: a/b\r\n\r\nall"
    async with running(Server(ends, then_close=True)) as post:
        assert await post() == Answer(200, "a/b", b"all")
    chunked = b"HTTP/1.1 404 No\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nab\r\n1\r\nc\r\n0\r\n\r\n"
    server = Server(b"HTTP/1.1 100 Continue\r\n\r\n" + chunked, OK)
    async with running(server) as post:
        assert await post() == Answer(404, "", b"abc")
        assert (await post()).status == 200
    assert server.connections == 1


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nshort",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nab\r\n",
        b"HTTP/1.1 200",
        b"nonsense\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 2\r\n\r\nok",
        b"HTTP/1.1 200 OK\r\nContent-Length: 99999\r\n\r\n" + bytes(99999),
        b"HTTP/1.1 200 OK\r\nX: " + b"y" * 99999 + b"\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 20000 + b"\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: other\r\n\r\n",
    ],
)
async def test_what_is_no_answer_is_told_as_such(answer: bytes) -> None:
    async with running(Server(answer, then_close=True)) as post:
        with pytest.raises(NoAnswer):
            await post()


@pytest.mark.parametrize("more", [OK.replace(b"ok", b"no"), b"k"])
async def test_what_a_server_sends_behind_an_answer_is_never_the_next_one(more: bytes) -> None:
    server = Server(OK + more, OK)
    async with running(server) as post:
        try:
            assert (await post()).content == b"ok"
        except NoAnswer:
            pass
        assert await post() == Answer(200, "text/plain", b"ok")
    assert server.connections == 2


async def test_a_redirection_is_an_answer_and_cookies_are_not_kept() -> None:
    moved = b"HTTP/1.1 307 Moved\r\nLocation: /other\r\nSet-Cookie: a=b\r\nContent-Length: 0\r\n\r\n"
    server = Server(moved, OK)
    async with running(server) as post:
        assert (await post()).status == 307
        await post()
    assert len(server.requests) == 2
    assert not any(b"cookie" in request.lower() for request in server.requests)


async def test_a_server_that_does_not_listen_was_not_reached() -> None:
    pool = Connections(max_bytes=10)
    async with pool.run():
        async with await anyio.create_tcp_listener(local_host="127.0.0.1") as listener:
            port = listener.extra(anyio.abc.SocketAttribute.local_port)
        with pytest.raises(NotConnected):
            await pool.ask("POST", f"http://127.0.0.1:{port}/call", {}, timeout=5)


async def test_a_server_that_hangs_up_while_tls_begins_was_not_reached() -> None:
    server = Server(b"nonsense", then_close=True)
    pool = Connections(max_bytes=10)
    async with running(server), pool.run():
        with pytest.raises(NotConnected):
            await pool.ask("POST", server.url.replace("http", "https"), {}, timeout=5)


async def test_a_key_with_a_line_break_adds_no_header() -> None:
    server = Server(OK)
    async with running(server) as post:
        with pytest.raises(ValueError):
            await post(key="a\r\nX-Admin: yes")
    assert not server.requests


async def test_a_call_goes_through_the_proxy_that_a_variable_names(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY", "no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    proxy, pool = Server(OK), Connections(max_bytes=1000)
    find_proxy.cache_clear()
    async with running(proxy), pool.run():
        assert find_proxy("http://gym.example:8000/call") is None
        monkeypatch.setenv("all_proxy", proxy.url.replace("/call", "").replace("//", "//me:secret@"))
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        find_proxy.cache_clear()
        assert await pool.ask("POST", "http://gym.example:8000/call", {}, timeout=5) == Answer(200, "text/plain", b"ok")
        assert find_proxy("http://127.0.0.1:8000/call") is None
    find_proxy.cache_clear()
    head = proxy.requests[0].lower().split(b"\r\n")
    assert head[0] == b"post http://gym.example:8000/call http/1.1"
    assert any(line.startswith(b"proxy-authorization: basic ") for line in head)
