"""Receiving heartbeats: they are lost without a listener, and malformed ones are ignored."""

from collections.abc import Callable

import structlog

from fleetbus.bus.base import Bus
from fleetbus_schemas import Heartbeat, MalformedMessage, decode

log = structlog.get_logger()

HEARTBEAT_SECONDS = 2.0
"""How often every worker says that it lives; its lane is renewed as often."""

SILENT_AFTER_SECONDS = 2 * HEARTBEAT_SECONDS
"""Who is not heard of for this long (two are due) counts as silent."""

LOST_AFTER_SECONDS = 5 * HEARTBEAT_SECONDS
"""Who is not heard of for this long is replaced: its lane is free, and its sessions are asked of others."""


async def follow_heartbeats(bus: Bus, subject: str, on_heartbeat: Callable[[Heartbeat], None]) -> None:
    """Tell ``on_heartbeat`` of every heartbeat on ``subject`` (wildcards allowed), until cancelled."""
    async with bus.listen(subject) as listener:
        while True:
            said_on, payload = await listener.receive()
            try:
                beat = decode(Heartbeat, payload, subject=said_on)
            except MalformedMessage as malformed:
                log.warning("heartbeat is malformed; ignoring it", reason=malformed.reason)
                continue
            on_heartbeat(beat)
