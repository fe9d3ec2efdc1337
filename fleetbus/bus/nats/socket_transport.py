"""The socket to a server as nats-py's client uses it, with a shorter way for messages: nats-py sees none of them.

nats-py's `Transport` is its public interface to a socket. This one dispatches messages as they arrive and hands over the other
lines alone; what `SocketWire` sends it writes without asking nats-py. Above it are nats-py's client and the wire.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from urllib.parse import ParseResult

from nats.aio.transport import Transport
from nats.errors import AuthorizationError, Error, ProtocolError

from fleetbus.bus.nats.message_parser import Dispatch, MessageParser, is_error, is_forbidden

CLOSE_SECONDS = 0.5
"""How long a closed connection may take to end; a peer that says nothing would keep it open."""

MAX_LINES = 10_000
"""Lines that nats-py may leave unread; it takes each at once, so more are no protocol."""

OnError = Callable[[Exception], Awaitable[None]]


class TlsMissing(ssl.SSLError):
    """The server offers no TLS, though the URL asks for it: nats-py would say in the clear who connects."""


class Socket(asyncio.Protocol):
    """One connection. ``on_writable`` is called when the peer has read all that waited, ``on_lost`` when it has ended."""

    def __init__(self, dispatch: Dispatch, on_writable: Callable[[], None], on_lost: Callable[[Socket], None]) -> None:
        self._parser = MessageParser(dispatch)
        self._on_writable = on_writable
        self._on_lost = on_lost
        self._waiters: list[asyncio.Future[None]] = []
        self.transport: asyncio.Transport
        self.lines: deque[bytes] = deque()
        self.failure: ProtocolError | None = None
        self.is_lost = False
        self.is_paused = False
        self.reader: asyncio.Task[object] | None = None

    def use(self, transport: asyncio.BaseTransport) -> None:
        """Write to this transport; a TLS handshake brings another."""
        assert isinstance(transport, asyncio.Transport) or hasattr(transport, "write")
        self.transport = transport  # type: ignore[assignment]  # uvloop's are of no common class
        self.transport.set_write_buffer_limits(high=1, low=0)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.use(transport)

    def data_received(self, data: bytes) -> None:
        if self.failure is not None:
            return
        try:
            self.lines.extend(self._parser.feed(data))
            if len(self.lines) > MAX_LINES:
                raise ProtocolError("nats: endless lines")
        except ProtocolError as error:
            self.failure = error
        if self.lines or self.failure:
            self._wake()

    def pause_writing(self) -> None:
        self.is_paused = True

    def resume_writing(self) -> None:
        self.is_paused = False
        self._wake()
        self._on_writable()

    def connection_lost(self, error: Exception | None) -> None:
        self.is_lost = True
        self._wake()
        self._on_lost(self)

    async def wait(self) -> None:
        """Until something arrives, can be written, or the connection ends."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        await waiter

    def abort(self) -> None:
        with suppress(AttributeError):  # asyncio's transports forget their loop once they are closed, and then stumble
            self.transport.abort()

    def _wake(self) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)


class SocketTransport(Transport):  # type: ignore[misc]  # nats-py is untyped
    """nats-py's `Transport` over one `Socket` after another. ``on_error`` hears of each error that the server sends."""

    def __init__(
        self, dispatch: Dispatch, on_writable: Callable[[], None], on_lost: Callable[[], None], on_error: OnError
    ) -> None:
        self._dispatch = dispatch
        self._on_writable = on_writable
        self._on_lost = on_lost
        self._on_error = on_error
        self.socket: Socket | None = None
        self._wants_tls = False
        self._left_behind: asyncio.Task[object] | None = None

    async def connect(self, uri: ParseResult, buffer_size: int, connect_timeout: int) -> None:
        self.abort()  # an earlier attempt that got no greeting would leave its socket open
        self._left_behind = self.socket.reader if self.socket is not None else None
        host, port = uri.hostname or "", uri.port or 0  # nats-py has filled in both
        self._wants_tls = uri.scheme == "tls"
        async with asyncio.timeout(connect_timeout):
            _, self.socket = await asyncio.get_running_loop().create_connection(self._make_socket, host, port)

    async def connect_tls(
        self, uri: str | ParseResult, ssl_context: ssl.SSLContext, buffer_size: int, connect_timeout: int
    ) -> None:
        socket = self._get_socket()
        host = uri if isinstance(uri, str) else uri.hostname
        async with asyncio.timeout(connect_timeout):
            transport = await asyncio.get_running_loop().start_tls(socket.transport, socket, ssl_context, server_hostname=host)
        if transport is None:
            raise ConnectionError("the connection ended during the TLS handshake")
        socket.use(transport)
        self._wants_tls = False

    def write(self, payload: bytes) -> None:
        if self._wants_tls:
            raise TlsMissing("the server offers no TLS")
        if self.socket is not None and not self.socket.is_lost:
            self.socket.transport.write(payload)

    def writelines(self, payload: list[bytes]) -> None:
        self.write(b"".join(payload))

    async def read(self, buffer_size: int) -> bytes:
        """The next lines that are no messages; empty once the connection has ended. An error of the server is told to
        ``on_error``, and ends the connection, unless it is about a right that is missing."""
        socket = self._get_socket()
        reader = asyncio.current_task()
        if reader is self._left_behind:  # by nats-py, when a new connection fails: it would take the next greeting
            raise asyncio.CancelledError
        socket.reader = reader
        while not socket.lines and socket.failure is None and not socket.is_lost:
            await socket.wait()
        lines: list[bytes] = []
        while socket.lines:
            line = socket.lines.popleft()
            if is_error(line):
                await self._on_error(_parse_error(line))
                if not is_forbidden(line):
                    raise ConnectionError(line.decode("utf-8", "replace").strip())
            else:
                lines.append(line)
        if not lines and socket.failure is not None:
            raise socket.failure
        return b"".join(lines)

    async def readline(self) -> bytes:
        socket = self._get_socket()
        while not socket.lines and socket.failure is None and not socket.is_lost:
            await socket.wait()
        if not socket.lines and socket.failure is not None:
            raise ValueError(f"no greeting of a NATS server: {socket.failure}")
        return socket.lines.popleft() if socket.lines else b""

    async def drain(self) -> None:
        while self.socket is not None and self.socket.is_paused and not self.socket.is_lost:
            await self.socket.wait()

    def close(self) -> None:
        """End the connection; what the peer has not read is lost."""
        if self.socket is not None and not self.socket.is_lost:
            if self.socket.transport.get_write_buffer_size():
                self.socket.abort()
            else:
                self.socket.transport.close()

    async def wait_closed(self) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_SECONDS):
                while self.socket is not None and not self.socket.is_lost:
                    await self.socket.wait()
        self.abort()

    def abort(self) -> None:
        """End the connection at once."""
        if self.socket is not None:
            self.socket.abort()

    def at_eof(self) -> bool:
        socket = self.socket
        return socket is None or (socket.is_lost and not socket.lines)

    def __bool__(self) -> bool:
        return True  # for nats-py, which would make one of its own

    def _make_socket(self) -> Socket:
        return Socket(self._dispatch, self._on_writable, self._hear_lost)

    def _hear_lost(self, socket: Socket) -> None:
        if socket is self.socket:
            self._on_lost()

    def _get_socket(self) -> Socket:
        if self.socket is None:
            raise ConnectionError("not connected")
        return self.socket


def _parse_error(line: bytes) -> Exception:
    text = line[4:].strip().decode("utf-8", "replace").lower()
    error: Exception = AuthorizationError() if "authorization violation" in text else Error(f"nats: {text}")
    return error
