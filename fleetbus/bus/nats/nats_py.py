"""The private names of nats-py that the bus uses, and whether this nats-py has them.

No other file uses any. `find_unsupported` looks for each when a connection is made: where one is missing, or a signature is
another, the bus goes by nats-py's public calls (`fleetbus.bus.nats.client_wire`), which are slower, and says so once. So an
upgrade of nats-py may slow the bus, and does not break it.
"""

from __future__ import annotations

import inspect
import logging
from importlib.metadata import version

from nats.aio.client import Client
from nats.aio.transport import Transport

from fleetbus.bus.nats.socket_transport import SocketTransport

PRIVATE_NAMES = ("_transport",)
"""Attributes of a new `Client`. ``_transport``: None, and what it holds when it connects is used in place of a transport of
nats-py's own."""

_FAST_SCHEMES = ("nats", "tls")
"""Of URLs that lead to a plain socket; nats-py's own transport speaks WebSocket."""

log = logging.getLogger(__name__)
_said: set[str] = set()


def find_unsupported(url: str) -> str:
    """The reason why the bus cannot use a socket of its own here; empty if it can."""
    if any(scheme and scheme not in _FAST_SCHEMES for scheme in _list_schemes(url)):
        return "the URL is not that of a plain socket"
    client = Client()
    for name in PRIVATE_NAMES:
        if getattr(client, name, client) is not None:
            return f"nats-py {version('nats-py')} has no {name} to set"
    for name in Transport.__abstractmethods__:
        wanted, found = getattr(Transport, name), getattr(SocketTransport, name, None)
        if found is None or _list_parameters(wanted) != _list_parameters(found):
            return f"nats-py {version('nats-py')} calls its transport's {name} in another way"
    return ""


def attach_transport(client: Client, transport: Transport) -> None:
    """Let a client that is not connected yet use this transport."""
    client._transport = transport


def warn_once(reason: str) -> None:
    """Say, once per process, why the bus is slower than it could be."""
    if reason not in _said:
        _said.add(reason)
        log.warning("nats: using nats-py's public calls, which are slower: %s", reason)


def _list_schemes(url: str) -> list[str]:
    return [each.strip().rpartition("://")[0] for each in url.split(",")]


def _list_parameters(function: object) -> list[str]:
    return list(inspect.signature(function).parameters)  # type: ignore[arg-type]
