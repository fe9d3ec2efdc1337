"""Workers that reach a server's WebSocket by the proxy that HTTPS_PROXY names, and by no other way."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import urlparse

import anyio
import anyio.abc
import pytest
from anyio.streams.buffered import BufferedByteReceiveStream

from fleetbus.bus.nats import connect
from fleetbus.bus.nats.websocket_transport import find_proxy
from fleetbus.errors import UserError
from tests.system.test_websocket import S, serving

PASSWORD = "pass%3Aword"
ALLOWED = b64encode(b"ada:pass:word").decode()


class Proxy:
    """One that answers CONNECT. ``asked`` are the host and credentials of each; ``refuses`` is its answer to all, if set."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str]] = []
        self.refuses = b""
        self.opened: list[anyio.abc.SocketStream] = []
        self.url = ""

    async def serve(self, client: anyio.abc.SocketStream) -> None:
        async with client:
            head = await BufferedByteReceiveStream(client).receive_until(b"\r\n\r\n", 8192)
            first, *headers = head.decode().split("\r\n")
            said = next((line for line in headers if line.lower().startswith("proxy-authorization")), "")
            self.asked.append((first.split()[1], said.partition("Basic ")[2]))
            if self.refuses:
                await client.send(self.refuses)
                return
            host, _, port = first.split()[1].rpartition(":")
            async with await anyio.connect_tcp(host, int(port)) as server, anyio.create_task_group() as tasks:
                self.opened += [client, server]
                await client.send(b"HTTP/1.1 200 Connection established\r\n\r\n")
                tasks.start_soon(self._hand_on, client, server)
                await self._hand_on(server, client)
                tasks.cancel_scope.cancel()

    async def cut(self) -> None:
        """End all connections that go through."""
        opened, self.opened = self.opened, []
        for stream in opened:
            await anyio.aclose_forcefully(stream)

    @staticmethod
    async def _hand_on(source: anyio.abc.SocketStream, target: anyio.abc.SocketStream) -> None:
        try:
            async for data in source:
                await target.send(data)
        except (anyio.BrokenResourceError, anyio.ClosedResourceError):
            return


@asynccontextmanager
async def proxying(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Proxy]:
    proxy = Proxy()
    for name in ("http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    listener = await anyio.create_tcp_listener(local_host="127.0.0.1")
    async with listener, anyio.create_task_group() as tasks:
        tasks.start_soon(listener.serve, proxy.serve)
        port = listener.extra(anyio.abc.SocketAttribute.local_port)
        proxy.url = f"http://ada:{PASSWORD}@127.0.0.1:{port}"
        monkeypatch.setenv("HTTPS_PROXY", proxy.url)
        yield proxy
        tasks.cancel_scope.cancel()


@pytest.mark.integration
async def test_a_worker_goes_by_the_proxy_and_comes_back_by_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with anyio.fail_after(50):
        async with proxying(monkeypatch) as proxy, serving(tmp_path) as place, place.connect("learner") as bus:
            await bus.publish(S.train("default"), b"1")
            await proxy.cut()
            await bus.publish(S.train("default"), b"2")
    assert proxy.asked == [(f"127.0.0.1:{place.ports[0]}", ALLOWED)] * 2


@pytest.mark.integration
async def test_a_host_without_a_proxy_is_reached_directly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with anyio.fail_after(50):
        async with proxying(monkeypatch) as proxy, serving(tmp_path) as place:
            monkeypatch.setenv("NO_PROXY", "127.0.0.1")
            async with place.connect("learner") as bus:
                await bus.publish(S.train("default"), b"1")
    assert proxy.asked == []


@pytest.mark.integration
async def test_a_proxy_that_refuses_is_an_error_of_one_line_without_its_password(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    with anyio.fail_after(50):
        async with proxying(monkeypatch) as proxy, serving(tmp_path) as place:
            proxy.refuses = b"HTTP/1.1 407 Proxy Authentication Required\r\nContent-Length: 0\r\n\r\n"
            with pytest.raises(UserError) as refused:
                async with place.connect("learner"):
                    pass
    assert "\n" not in str(refused.value) and "by the proxy that HTTPS_PROXY names" in str(refused.value)
    assert not any(secret in f"{refused.getrepr()}{caplog.text}" for secret in (PASSWORD, "pass:word", ALLOWED))


@pytest.mark.parametrize(
    ("url", "proxy"), [("wss://h", "http://p:1"), ("ws://h", "http://q:2"), ("wss://h.inside", ""), ("wss://h:9", "http://p:1")]
)
def test_the_proxy_is_that_of_the_scheme_unless_the_host_is_excepted(
    url: str, proxy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("https_proxy", "p:1"), ("http_proxy", "http://q:2"), ("no_proxy", ".inside")):
        monkeypatch.setenv(name, value)
    assert find_proxy(urlparse(url)) == (proxy, {})


@pytest.mark.parametrize("proxy", ["socks5://p:1", "ftp://ada:word@p:1", "http://[::"])
async def test_a_proxy_that_no_websocket_goes_by_is_named_by_its_variable_and_without_its_password(
    proxy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was said that no server answers, or that what answers is none."""
    for name in ("https_proxy", "no_proxy", "HTTPS_PROXY", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HTTPS_PROXY", proxy)
    with pytest.raises(UserError, match=r"^HTTPS_PROXY ") as refused:
        async with connect("wss://nats.example:443", run="r1", worker="w"):
            pass
    assert "word" not in str(refused.value)
