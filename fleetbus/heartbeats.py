"""Whoever looks at a fleet hears its heartbeats: lost when nobody listens, and ignored when they cannot be read."""

from __future__ import annotations

from collections.abc import Callable

import structlog

from fleetbus.bus.base import Bus
from fleetbus_schemas import Heartbeat, MalformedMessage, decode

log = structlog.get_logger()


async def follow_heartbeats(bus: Bus, subject: str, heard: Callable[[Heartbeat], None]) -> None:
    """Tell ``heard`` of every heartbeat on ``subject`` (wildcards allowed), until cancelled."""
    async with bus.listen(subject) as listener:
        while True:
            said_on, payload = await listener.receive()
            try:
                beat = decode(Heartbeat, payload, subject=said_on)
            except MalformedMessage as malformed:
                log.warning("heartbeat ignored", reason=malformed.reason)
                continue
            heard(beat)
