"""Receiving heartbeats: they are lost without a listener, and malformed ones are ignored, as are those in another's name."""

from collections.abc import Callable

import structlog

from fleetbus.bus.base import CallBus
from fleetbus_schemas import Heartbeat, MalformedMessage, decode

log = structlog.get_logger()

HEARTBEAT_SECONDS = 2.0
"""How often every worker says that it lives; its lane is renewed as often."""

SILENT_AFTER_SECONDS = 2 * HEARTBEAT_SECONDS
"""Who is not heard of for this long (two are due) counts as silent."""

LOST_AFTER_SECONDS = 5 * HEARTBEAT_SECONDS
"""Who is not heard of for this long is replaced: its lane is free, and its sessions are asked of others."""

MOST_BYTES = 16 << 10
"""Of a heartbeat: it has some tens of counters, and whoever listens keeps the newest of thousands of workers."""


def decode_heartbeat(subject: str, payload: bytes) -> Heartbeat:
    """The heartbeat that was said on ``subject``; raises `MalformedMessage` also if its role and worker are not those of the
    subject: rights are by subject, so an environment worker's key cannot say that the learner is paused."""
    if len(payload) > MOST_BYTES:
        raise MalformedMessage(subject, f"a heartbeat of {len(payload)} bytes exceeds {MOST_BYTES}")
    beat = decode(Heartbeat, payload, subject=subject)
    if subject.split(".")[2:] != [beat.role, beat.worker]:
        raise MalformedMessage(subject, f"the heartbeat names {beat.role} {beat.worker[:64]!r}")
    return beat


async def follow_heartbeats(bus: CallBus, subject: str, on_heartbeat: Callable[[Heartbeat], None]) -> None:
    """Tell ``on_heartbeat`` of every heartbeat on ``subject`` (wildcards allowed), until cancelled."""
    async with bus.listen(subject) as listener:
        while True:
            said_on, payload = await listener.receive()
            try:
                beat = decode_heartbeat(said_on, payload)
            except MalformedMessage as malformed:
                log.warning("heartbeat is malformed; ignoring it", reason=malformed.reason)
                continue
            on_heartbeat(beat)
