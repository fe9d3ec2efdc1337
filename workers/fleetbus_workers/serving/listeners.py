"""Listening sockets of fleetbus: bound before anything else starts, served by uvicorn."""

import contextlib
import ipaddress
import socket
from collections.abc import Iterator

import uvicorn

from fleetbus.errors import UserError

BACKLOG = 1024


class SignalFreeServer(uvicorn.Server):
    """Signals are the caller's, who decides when ``should_exit``."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def bind(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 is any free one. Raises `UserError`."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        bound = socket.socket(family, kind, protocol)
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or "that is not a valid host name"
        raise UserError(f"--host {host} is not an address of this machine: {reason}") from error
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
        bound.listen(BACKLOG)
        bound.setblocking(False)
    except OSError as error:
        bound.close()
        raise UserError(f"{host}:{port} cannot be used ({error.strerror}): choose another with --port, or 0 for any") from error
    return bound


def is_loopback(host: str) -> bool:
    """True if only this machine can reach ``host``."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def format_host(host: str) -> str:
    """A host as it stands in a URL."""
    return f"[{host}]" if ":" in host else host
