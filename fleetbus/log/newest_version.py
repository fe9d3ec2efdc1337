"""The version of a policy that was published last, as the log says."""

from fleetbus.bus.base import LogBus
from fleetbus.log.episodes import decode_entries
from fleetbus_schemas import LineageStarted, PolicyPublished


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
