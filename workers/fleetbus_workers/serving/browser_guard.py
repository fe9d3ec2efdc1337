"""Refuses calls of web pages on other sites to a service of ours: an ASGI middleware around every application.

A browser lets any page open WebSockets to any address, send simple requests there, and, by a name whose address changes
(rebinding), read answers as its own. So a request is answered only under a host name that no stranger can own, from no origin
but the service's own, and with a body of a type that the protocol has. Programs send no Origin and are not affected.
"""

import ipaddress
import socket
from collections.abc import Sequence
from functools import lru_cache
from typing import Any
from urllib.parse import urlsplit

import msgspec
from starlette.types import ASGIApp, Receive, Scope, Send

_READ_HEADERS = {
    name.encode(): name for name in ("host", "origin", "content-type", "content-length", "transfer-encoding", "sec-fetch-site")
}
LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})
PRIVATE_SUFFIXES = (".localhost", ".internal", ".cluster.local", ".svc")
"""Names below these are given by who runs the network; a public name server cannot have them."""


class GuardSettings(msgspec.Struct, frozen=True, kw_only=True):
    """``hosts`` and ``origins`` (``https://name:port``) are allowed besides those that are safe; ``content_types`` of bodies,
    ``type/`` for all of a type, empty: any; ``loopback``: only this machine reaches the service, under its own names."""

    hosts: tuple[str, ...] = ()
    origins: tuple[str, ...] = ()
    content_types: tuple[str, ...] = ()
    loopback: bool = False


class BrowserGuard:
    """Refuses with 400 (host), 403 (origin) or 415 (type of the body) before the application sees anything."""

    def __init__(self, app: ASGIApp, settings: GuardSettings) -> None:
        self._app = app
        self._settings = settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = self._check(scope) if scope["type"] in ("http", "websocket") else None
        if refusal is None:
            await self._app(scope, receive, send)
            return
        status, reason = refusal
        if scope["type"] == "websocket":
            await receive()  # the handshake
            await send({"type": "websocket.close", "code": 1008, "reason": reason})
            return
        body = msgspec.json.encode({"detail": reason})
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": status, "headers": [*headers, (b"connection", b"close")]})
        await send({"type": "http.response.body", "body": body})

    def _check(self, scope: Scope) -> tuple[int, str] | None:
        headers: dict[str, str] = {}
        for name, value in scope["headers"]:
            key = _READ_HEADERS.get(name.lower())
            if key is None:
                continue
            if key in ("host", "origin", "content-type") and key in headers:
                return 400, f"two headers {key}"
            headers[key] = value.decode("latin-1")
        host = headers.get("host", "")
        if not is_allowed_host(host, self._settings):
            return 400, "this host name is not allowed here: --allow-host adds it"
        origin = headers.get("origin")
        if origin is not None and not _is_own_origin(origin, host) and origin not in self._settings.origins:
            return 403, "requests of pages from another origin are not allowed here: --allow-origin adds one"
        if (
            origin is None
            and headers.get("sec-fetch-site") == "cross-site"
            and scope.get("method", "GET") not in ("GET", "HEAD")
        ):
            return 403, "requests of pages from another site are not allowed here"
        return self._check_type(scope, headers)

    def _check_type(self, scope: Scope, headers: dict[str, str]) -> tuple[int, str] | None:
        allowed = self._settings.content_types
        has_body = "transfer-encoding" in headers or headers.get("content-length", "0") != "0"
        if scope["type"] != "http" or not allowed or not has_body:
            return None
        if not headers.keys() & {"content-type", "origin", "sec-fetch-site"}:
            return None  # no browser: a program that does not say what it sends
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        if any(kind == each or (each.endswith("/") and kind.startswith(each)) for each in allowed):
            return None
        return 415, f"a body must be of the type {' or '.join(allowed)}"


def is_allowed_host(header: str, settings: GuardSettings) -> bool:
    """True if the Host header names us as no stranger's name server can: by address, by a name without a domain or of this
    machine, or as listed."""
    host = _strip_port(header)
    if host in LOOPBACK_NAMES or host in settings.hosts or header in settings.hosts:
        return True
    if settings.loopback or not host:
        return False
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return "." not in host or host.endswith(PRIVATE_SUFFIXES) or host in _own_names()
    return True


def _strip_port(header: str) -> str:
    """The host of ``host``, ``host:port``, ``[v6]`` or ``[v6]:port`` in lower case; empty if it has another form."""
    if header.startswith("["):
        host, closed, port = header[1:].partition("]")
        return host.lower() if closed and (not port or (port[1:].isdecimal() and port[0] == ":")) else ""
    host, _, port = header.partition(":")
    return host.lower().removesuffix(".") if not port or port.isdecimal() else ""


def _is_own_origin(origin: str, host: str) -> bool:
    try:
        parts = urlsplit(origin)
    except ValueError:
        return False
    return parts.scheme in ("http", "https") and parts.netloc.lower() == host.lower() and not (parts.path or parts.query)


@lru_cache(maxsize=1)
def _own_names() -> frozenset[str]:
    return frozenset({socket.gethostname().lower(), socket.getfqdn().lower()})


def build_guard_settings(host: str, allowed_hosts: Sequence[str], allowed_origins: Sequence[str], **more: Any) -> GuardSettings:
    """The settings of a service that listens on ``host``."""
    from fleetbus_workers.serving.listeners import is_loopback

    hosts = tuple(name.lower() for name in allowed_hosts)
    origins = tuple(origin.rstrip("/") for origin in allowed_origins)
    return GuardSettings(hosts=hosts, origins=origins, loopback=is_loopback(host), **more)
