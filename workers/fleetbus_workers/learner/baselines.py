"""The first version that a league has: whom held-out episodes meet. It is named in the log once, for good.

It stands on the subject of the league's own policy, which has no other versions: those of the run's policy leave the log as
they become old. So every learner knows it, whatever its disk holds, and the worker that plays it finds it
(docs/decisions/0255-a-league-of-versions.md).
"""

import anyio
import structlog

from fleetbus.bus.base import LogBus
from fleetbus.errors import LogFull, PublishUnanswered, RequestUnanswered, SequenceConflict, UserError
from fleetbus.log.episodes import decode_entries
from fleetbus_schemas import LineageStarted, PolicyPublished, encode
from fleetbus_workers.learner.journal import RETRY_SECONDS

log = structlog.get_logger()


async def find_or_name_baseline(bus: LogBus, subject: str, published: PolicyPublished) -> PolicyPublished:
    """The first version of the policy on ``subject``, a league's, or ``published`` from now on if nothing is there; however
    long it takes. Raises `UserError` where only something else is."""
    while True:
        try:
            first, is_empty = None, True
            async for entry in bus.scan([subject]):  # one at a time: each may have the manifest of a whole model
                is_empty = False
                if first is None:
                    found = decode_entries(PolicyPublished, [entry], beside=(LineageStarted,))
                    first = next((version for _, version in found if version.policy == published.policy), None)
            if first is not None:
                return first
            if not is_empty:
                other = f"{subject} holds no version of {published.policy}, but something else"
                raise UserError(f"{other}: give the seat of the league another name")
            await bus.publish(subject, encode(published, subject=subject), expected_last=0)
            log.info("first version of a league", subject=subject, version=published.version)
        except (LogFull, PublishUnanswered, RequestUnanswered, SequenceConflict) as error:
            log.warning("first version of a league is not named yet; retrying", subject=subject, reason=str(error))
            await anyio.sleep(RETRY_SECONDS)
