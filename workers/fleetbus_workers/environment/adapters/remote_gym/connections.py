"""HTTP to remote-gym servers through aiohttp: kept connections, bounded answers, no redirects, no cookies.

A call of this protocol is short, so its client's own CPU counts: aiohttp takes a tenth of what httpx takes. Needs asyncio.
"""

from __future__ import annotations

import os
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import lru_cache
from typing import NamedTuple
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import aiohttp
import certifi
from yarl import URL

KEEP_ALIVE_SECONDS = 2.0
"""Idle connections are dropped before a server does (uvicorn after 5 s), so that a step never meets a closing one."""
MAX_HEAD_LINE_BYTES = 8 << 10
_NOT_SENT = (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError, aiohttp.ClientHttpProxyError)


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
    """Connections to any number of servers, each used by one call at a time. Enter `run` around all calls."""

    def __init__(self, *, max_bytes: int) -> None:
        """``max_bytes`` is the most that the body of an answer may have."""
        self._max_bytes = max_bytes
        self._session: aiohttp.ClientSession | None = None

    @asynccontextmanager
    async def run(self) -> AsyncIterator[None]:
        async with aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_SECONDS, ssl=_build_tls()),
            cookie_jar=aiohttp.DummyCookieJar(),
            headers={"Accept-Encoding": "identity"},
            auto_decompress=False,
            max_line_size=MAX_HEAD_LINE_BYTES,
            max_field_size=MAX_HEAD_LINE_BYTES,
        ) as self._session:
            try:
                yield
            finally:
                self._session = None

    async def ask(self, method: str, url: str, headers: dict[str, str], *, timeout: float, body: bytes | None = None) -> Answer:
        """Exchange one request for its answer: at most ``timeout`` seconds to connect, as many for each pause of the answer,
        twice as many for both. Raises `NotConnected`, `NoAnswer`, and `ValueError` for headers that cannot be sent."""
        if self._session is None:
            raise RuntimeError("enter run() of the environment factory before the first episode")
        limits = aiohttp.ClientTimeout(total=2 * timeout, sock_connect=timeout, sock_read=timeout)
        try:
            async with self._session.request(
                method, _parse(url), data=body, headers=headers, timeout=limits, allow_redirects=False, proxy=find_proxy(url)
            ) as answer:
                return Answer(answer.status, answer.headers.get("Content-Type", ""), await self._read(answer))
        except _NOT_SENT as error:
            raise NotConnected(_describe(error, timeout)) from error
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise NoAnswer(_describe(error, timeout)) from error

    async def _read(self, answer: aiohttp.ClientResponse) -> bytes:
        if answer.status < 200:
            raise aiohttp.ClientPayloadError(f"the server answered {answer.status}, which was not asked for")
        if answer.headers.get("Content-Encoding", "identity").lower() != "identity":
            raise aiohttp.ClientPayloadError("the answer is compressed, which was not asked for")
        parts, count = [], 0
        async for part in answer.content.iter_any():
            count += len(part)
            if count > self._max_bytes:
                raise aiohttp.ClientPayloadError(f"the answer exceeds {self._max_bytes} bytes")
            parts.append(part)
        return b"".join(parts)


@lru_cache(maxsize=1024)
def find_proxy(url: str) -> str | None:
    """Return the proxy through which this process is told to reach ``url``, by ``HTTP_PROXY`` and its like."""
    parts, proxies = urlsplit(url), getproxies()
    proxy = proxies.get(parts.scheme) or proxies.get("all")
    return proxy if proxy and not proxy_bypass(parts.hostname or "") else None


@lru_cache(maxsize=1024)
def _parse(url: str) -> URL:
    return URL(url, encoded=True)


def _build_tls() -> ssl.SSLContext:
    """Trust what httpx trusts for the other adapters: ``SSL_CERT_FILE`` and ``SSL_CERT_DIR``, or else certifi's roots."""
    file, folder = os.environ.get("SSL_CERT_FILE"), os.environ.get("SSL_CERT_DIR")
    return ssl.create_default_context(cafile=file or (None if folder else certifi.where()), capath=folder)


def _describe(error: Exception, timeout: float) -> str:
    if isinstance(error, aiohttp.ConnectionTimeoutError):
        return f"no connection within {timeout:g} s"
    if isinstance(error, TimeoutError):
        return f"nothing for {timeout:g} s"
    return str(error) or type(error).__name__
