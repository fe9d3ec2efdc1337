"""Chooses the wire of a connection: a socket of its own where nats-py allows it, nats-py's public calls elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

from anyio.abc import TaskGroup

from fleetbus.bus.nats.client_wire import ClientWire
from fleetbus.bus.nats.nats_py import find_unsupported, warn_once
from fleetbus.bus.nats.socket_wire import SocketWire, TransportUnused
from fleetbus.bus.nats.wire import Wire
from fleetbus.errors import UserError


async def connect_wire(
    url: str, tasks: TaskGroup, on_crash: Callable[[Exception], None], on_wire: Callable[[Wire], None], **options: Any
) -> None:
    """Connect the fastest wire there is to servers at ``url``; ``on_wire`` gets each one before it is tried, so that the caller
    can close it. ``options`` are those of `Wire.connect`."""
    servers = [each.strip() for each in url.split(",")]
    reason = find_unsupported(url)
    if not reason:
        wire: Wire = SocketWire(on_crash)
        on_wire(wire)
        try:
            await wire.connect(servers, **options)
            return
        except TransportUnused:
            reason = "nats-py ignores the transport that it was given"
            await wire.close()
    if any("ws" in each.partition("://")[0] for each in servers if "://" in each) and find_spec("aiohttp") is None:
        raise UserError("WebSocket (ws://, wss://) needs the package aiohttp: pip install 'fleetbus[websocket]'")
    warn_once(reason)
    wire = ClientWire(on_crash, tasks)
    on_wire(wire)
    await wire.connect(servers, **options)
