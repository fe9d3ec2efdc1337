"""Chooses the protocol of a server's connections: the fastest parser that is installed, and as many as the process can hold.

Above it are the servers; below it the bounded protocols (`connections`, `quick_connections`).
"""

from __future__ import annotations

import resource
from collections import OrderedDict
from importlib.util import find_spec
from typing import cast

import h11
import msgspec
from uvicorn.protocols.http.h11_impl import H11Protocol

from fleetbus_workers.serving.connections import BoundedProtocol, Bounds

OTHER_FILES = 256
"""Descriptors that are kept for what is no connection of a client: the bus, files, libraries."""


class H11BoundedProtocol(BoundedProtocol, H11Protocol):
    """With h11, which is everywhere."""

    def send_400_response(self, msg: str) -> None:
        """End the connection, for what is no HTTP. uvicorn would say so though an answer is under way or has gone out, and h11
        refuses that by an error that is logged with its traceback: as often as a client likes."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(msg)
        elif self.cycle.response_complete:
            self.transport.close()
        else:
            self.abort_connection()
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()

    def _between_requests(self) -> bool:
        return self.cycle is not None and self.conn.their_state is h11.IDLE and not self.conn.trailing_data[0]


def find_protocol() -> type[BoundedProtocol]:
    """The fastest that is installed."""
    if find_spec("httptools") is None:
        return H11BoundedProtocol
    from fleetbus_workers.serving.quick_connections import QuickProtocol  # needs httptools

    return QuickProtocol


def build_bounded_protocol(bounds: Bounds) -> type[BoundedProtocol]:
    """The protocol of one server, for `uvicorn.Config(http=...)`; connections are counted per server. Its own ``bounds`` have
    as many of them as this process can hold."""
    available_bounds = msgspec.structs.replace(bounds, connections=reserve_descriptors(bounds.connections))
    members: dict[str, object] = {"bounds": available_bounds, "waiting": OrderedDict()}
    return cast("type[BoundedProtocol]", type("Bounded", (find_protocol(),), members))


def reserve_descriptors(connections: int) -> int:
    """Number of connections that this process can hold, ``connections`` at most; asks for as many open files as that takes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = connections + OTHER_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return connections if soft == resource.RLIM_INFINITY else max(min(connections, soft - OTHER_FILES), 1)
