"""The versions of a policy that were published last, as the log says."""

from fleetbus.bus.base import LogBus
from fleetbus.log.episodes import decode_entries
from fleetbus_schemas import LineageStarted, PolicyPublished

FIRST_SPAN = 16
"""Positions of the log that are looked through first; then four times as many, and so on."""


async def find_newest_version(bus: LogBus, subject: str) -> tuple[int, PolicyPublished] | None:
    """The newest version on the policy's subject, and where it stands in the log; None if there is none.

    It is the last entry unless a learner is just beginning; otherwise the versions before, each with the manifest of a whole
    model, are not read.
    """
    last = await bus.last(subject)
    newest = decode_entries(PolicyPublished, [last] if last is not None else [], beside=(LineageStarted,))
    if not newest and last is not None:
        async for entry in bus.scan([subject]):
            newest = decode_entries(PolicyPublished, [entry], beside=(LineageStarted,)) or newest
    return (newest[-1][0].sequence, newest[-1][1]) if newest else None


async def find_versions_before(bus: LogBus, subject: str, sequence: int, *, most: int) -> list[PolicyPublished]:
    """Up to ``most`` versions that stand before ``sequence`` on the policy's subject, the newest of them, in their order.

    The log is read from ever further back, so that of all its versions, each with the manifest of a whole model, few are read.
    """
    span = FIRST_SPAN
    while True:
        start = max(sequence - span, 1)
        entries = [entry async for entry in bus.scan([subject], start=start) if entry.sequence < sequence]
        found = [published for _, published in decode_entries(PolicyPublished, entries, beside=(LineageStarted,))]
        if len(found) >= most or start == 1:
            return found[-most:]
        span *= 4
