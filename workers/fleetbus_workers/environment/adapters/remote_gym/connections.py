"""HTTP/1.1 to remote-gym servers with little between a call and its socket: kept connections, answers read by httptools.

A general client spends more on a call than the servers of this protocol do. Whoever has to go through a proxy uses one.
"""

from __future__ import annotations

import select
import ssl
from collections import defaultdict
from functools import cached_property, lru_cache
from typing import NamedTuple
from urllib.parse import SplitResult, urlsplit

import anyio
import anyio.abc
import httptools

KEEP_ALIVE_SECONDS = 2.0
"""Idle connections are dropped before a server does (uvicorn after 5 s), so that a step never meets a closing one."""
MOST_IDLE = 256
CHUNK_BYTES = 1 << 18
MAX_HEAD_BYTES = 64 << 10
_BROKEN = (
    OSError,
    anyio.BrokenResourceError,
    anyio.ClosedResourceError,
    anyio.EndOfStream,
    httptools.HttpParserError,
    httptools.HttpParserUpgrade,
)


class NotConnected(Exception):
    """Nothing was sent."""


class NoAnswer(Exception):
    """The request left, wholly or in part; what came back, if anything did, is no answer."""


class Answer(NamedTuple):
    """A whole answer."""

    status: int
    content_type: str
    content: bytes


class Connections:
    """Connections to any number of servers, each used by one call at a time. `close` them at the end."""

    def __init__(self, *, max_bytes: int) -> None:
        """``max_bytes`` is the most that the body of an answer may have."""
        self._max_bytes = max_bytes
        self._idle: defaultdict[str, list[_Connection]] = defaultdict(list)

    async def post(self, url: str, body: bytes, headers: dict[str, str], *, timeout: float) -> Answer:
        """One exchange within ``timeout`` seconds, after connecting for as long at most. Raises `NotConnected`, `NoAnswer` and
        `ValueError` for headers that cannot be sent."""
        address = _split(url)
        request = encode_head(address, headers, len(body)) + body
        origin = f"{address.scheme}://{address.netloc}"
        connection = await self._take(origin) or await self._connect(address, timeout)
        try:
            with anyio.fail_after(timeout):
                answer = await connection.exchange(request, self._max_bytes)
        except TimeoutError as error:
            raise NoAnswer(f"nothing for {timeout:g} s") from error
        except _BROKEN as error:
            cause = error.__cause__ or error  # what a callback of the parser raised
            raise NoAnswer(str(cause) or type(cause).__name__) from error
        finally:
            if connection.is_reusable and len(self._idle[origin]) < MOST_IDLE:
                connection.idle_since = anyio.current_time()
                self._idle[origin].append(connection)
            else:
                await anyio.aclose_forcefully(connection.stream)
        return answer

    async def close(self) -> None:
        while self._idle:
            for connection in self._idle.popitem()[1]:
                await anyio.aclose_forcefully(connection.stream)

    async def _take(self, origin: str) -> _Connection | None:
        """The connection that was used last; those that are too old, or that the server has closed, are closed."""
        while idle := self._idle[origin]:
            connection = idle.pop()
            if anyio.current_time() - connection.idle_since < KEEP_ALIVE_SECONDS and not connection.is_readable:
                return connection
            await anyio.aclose_forcefully(connection.stream)
        return None

    async def _connect(self, address: SplitResult, timeout: float) -> _Connection:
        assert address.hostname is not None
        port = address.port or (443 if address.scheme == "https" else 80)
        try:
            with anyio.fail_after(timeout):
                if address.scheme == "https":
                    return _Connection(
                        await anyio.connect_tcp(address.hostname, port, ssl_context=self._tls, tls_standard_compatible=False)
                    )
                return _Connection(await anyio.connect_tcp(address.hostname, port))
        except TimeoutError as error:
            raise NotConnected(f"no connection within {timeout:g} s") from error
        except _BROKEN as error:  # also a server that hangs up while TLS begins
            raise NotConnected(str(error) or type(error).__name__) from error

    @cached_property
    def _tls(self) -> ssl.SSLContext:
        import httpx  # with the certificates of a system that has none, as its other users have them

        return httpx.create_ssl_context()


class _Connection:
    """One connection, and the answer that it is reading."""

    def __init__(self, stream: anyio.abc.ByteStream) -> None:
        self.stream = stream
        self.idle_since = 0.0
        self.is_reusable = False
        self._socket = stream.extra(anyio.abc.SocketAttribute.raw_socket)

    @property
    def is_readable(self) -> bool:
        """Something came without being asked for, as the end of a connection does."""
        if not hasattr(select, "poll"):
            return bool(select.select([self._socket], [], [], 0)[0])
        poll = select.poll()
        poll.register(self._socket.fileno(), select.POLLIN)
        return bool(poll.poll(0))

    async def exchange(self, request: bytes, max_bytes: int) -> Answer:
        """Raises one of `_BROKEN`; then the connection is not reusable."""
        self.is_reusable = self._keeps_alive = self._is_complete = self._has_head = self._has_length = False
        self._content, self._content_type, self._bytes, self._head_bytes = list[bytes](), "", 0, 0
        self._parser = httptools.HttpResponseParser(self)
        await self.stream.send(request)
        while not self._is_complete:
            try:
                chunk = await self.stream.receive(CHUNK_BYTES)
            except anyio.EndOfStream:
                if not self._has_head or self._has_length:
                    raise
                break  # an answer that ends with its connection
            self._bytes += len(chunk)
            if self._bytes > max_bytes + MAX_HEAD_BYTES:
                raise OSError(f"the answer exceeds {max_bytes} bytes")
            self._parser.feed_data(chunk)
        self.is_reusable = self._keeps_alive
        return Answer(self._parser.get_status_code(), self._content_type, b"".join(self._content))

    # Called by the parser

    def on_message_begin(self) -> None:
        if self._is_complete:
            raise OSError("the server sent more than one answer")

    def on_header(self, name: bytes, value: bytes) -> None:
        self._head_bytes += len(name) + len(value)
        if self._head_bytes > MAX_HEAD_BYTES:
            raise OSError(f"the headers of the answer exceed {MAX_HEAD_BYTES} bytes")
        match name.lower():
            case b"content-type":
                self._content_type = value.decode("latin-1")
            case b"content-length" | b"transfer-encoding":
                self._has_length = True
            case b"content-encoding" if value.lower() != b"identity":
                raise OSError("the answer is compressed, which was not asked for")

    def on_headers_complete(self) -> None:
        self._has_head = self._parser.get_status_code() >= 200

    def on_body(self, part: bytes) -> None:
        self._content.append(part)

    def on_message_complete(self) -> None:
        if self._has_head:  # else it announced an answer to come
            self._is_complete, self._keeps_alive = True, self._parser.should_keep_alive()


def encode_head(address: SplitResult, headers: dict[str, str], length: int) -> bytes:
    """Raises `ValueError` for headers that would not be headers."""
    path = (address.path or "/") + (f"?{address.query}" if address.query else "")
    lines = [f"POST {path} HTTP/1.1", f"Host: {address.netloc}", "Accept-Encoding: identity", f"Content-Length: {length}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    if any("\r" in line or "\n" in line for line in lines):
        raise ValueError("a header has more than one line")
    return "\r\n".join([*lines, "\r\n"]).encode("latin-1")


@lru_cache(maxsize=1024)
def _split(url: str) -> SplitResult:
    return urlsplit(url)
