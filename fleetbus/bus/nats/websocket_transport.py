"""A WebSocket to a server as nats-py's client uses it, by the proxy that the environment names.

nats-py has one of its own, which looks at no variable and bounds no handshake. Messages pass nats-py here: see `ClientWire`.
"""

from __future__ import annotations

import asyncio
import base64
import ssl
from contextlib import suppress
from typing import TYPE_CHECKING, Any
from urllib.parse import ParseResult, unquote, urlparse, urlsplit, urlunsplit
from urllib.request import getproxies, proxy_bypass

from nats.aio.transport import Transport

from fleetbus.errors import UserError

if TYPE_CHECKING:
    import aiohttp

CLOSE_SECONDS = 0.5
"""How long a peer may take to agree that it is over."""


def find_proxy(uri: ParseResult) -> tuple[str, dict[str, str]]:
    """The proxy of ``HTTPS_PROXY`` (``HTTP_PROXY`` for ``ws://``) and its headers; empty where there is none, and where
    ``NO_PROXY`` names the host. Raises `UserError` for one that no WebSocket goes by."""
    found = getproxies().get("https" if uri.scheme == "wss" else "http", "")
    if not found or proxy_bypass(f"{uri.hostname}:{uri.port}" if uri.port else uri.hostname or ""):
        return "", {}
    try:
        parts = urlsplit(found if "://" in found else f"http://{found}")
    except ValueError as error:
        raise UserError(f"{_name_variable(uri)} is no URL of a proxy: {error}") from error
    if parts.scheme not in ("http", "https"):
        raise UserError(
            f"{_name_variable(uri)} names a proxy of {parts.scheme}://, and a WebSocket goes by http:// or https://"
        )
    user, _, host = parts.netloc.rpartition("@")
    said = base64.b64encode(unquote(user).encode()).decode()
    return urlunsplit((parts.scheme, host, "", "", "")), {"Proxy-Authorization": f"Basic {said}"} if user else {}


def describe_proxy(url: str) -> str:
    """A part of an error's text: where a server is asked for that does not answer, if that is not its own address."""
    uri = urlparse(url)
    return f" by the proxy that {_name_variable(uri)} names" if uri.scheme in ("ws", "wss") and find_proxy(uri)[0] else ""


def _name_variable(uri: ParseResult) -> str:
    return "HTTPS_PROXY" if uri.scheme == "wss" else "HTTP_PROXY"


class WebSocketTransport(Transport):  # type: ignore[misc]  # nats-py is untyped
    """nats-py's `Transport` over one WebSocket after another."""

    def __init__(self) -> None:
        self._session: aiohttp.ClientSession | None = None
        self._socket: aiohttp.ClientWebSocketResponse | None = None
        self._written: list[bytes] = []

    async def connect(self, uri: ParseResult, buffer_size: int, connect_timeout: int) -> None:
        await self._connect(uri, connect_timeout)

    async def connect_tls(
        self, uri: str | ParseResult, ssl_context: ssl.SSLContext, buffer_size: int, connect_timeout: int
    ) -> None:
        if isinstance(uri, ParseResult):
            await self._connect(uri, connect_timeout, ssl=ssl_context)
        # A name comes when nats-py asks for the handshake that a WebSocket has behind it.

    async def _connect(self, uri: ParseResult, seconds: float, **options: Any) -> None:
        import aiohttp

        await self.wait_closed()
        proxy, headers = find_proxy(uri)
        if proxy:
            options |= {"proxy": proxy, "proxy_headers": headers}
        self._session = aiohttp.ClientSession()
        async with asyncio.timeout(seconds):
            self._socket = await self._session.ws_connect(uri.geturl(), max_msg_size=0, **options)

    def write(self, payload: bytes) -> None:
        self._written.append(payload)

    def writelines(self, payload: list[bytes]) -> None:
        self._written += payload

    async def read(self, buffer_size: int) -> bytes:
        return await self.readline()

    async def readline(self) -> bytes:
        import aiohttp

        if self._socket is None:
            return b""
        message = await self._socket.receive()
        if message.type is aiohttp.WSMsgType.ERROR:
            raise ConnectionError(f"the WebSocket failed: {message.data}")
        return message.data if message.type is aiohttp.WSMsgType.BINARY else b""

    async def drain(self) -> None:
        while self._written and self._socket is not None:
            written, self._written = self._written, []
            await self._socket.send_bytes(b"".join(written))

    def close(self) -> None:
        """The rest is done by `wait_closed`, which nats-py calls next."""

    async def wait_closed(self) -> None:
        socket, self._socket = self._socket, None
        session, self._session = self._session, None
        self._written.clear()
        if socket is not None:
            with suppress(TimeoutError):
                async with asyncio.timeout(CLOSE_SECONDS):
                    await socket.close()
        if session is not None:
            await session.close()

    def at_eof(self) -> bool:
        return self._socket is None or self._socket.closed

    def __bool__(self) -> bool:
        return True  # for nats-py, which would make one of its own
