"""Messages about what has left the log for good: settled, archived, never to be asked for, claimed or opened again."""

from __future__ import annotations

import msgspec

from fleetbus_schemas.message import Message


class FloorRaised(Message, frozen=True, kw_only=True):
    """Recorder → ``floor``, expecting the last entry there, before anything that it concerns is removed from the log.

    From here on these are refused by number, for the log may no longer hold what refused them: claims and results of a request
    that stands below ``sequence``; requests of learners for groups of a policy below ``groups``; other requests, and first
    claims on step-wise sessions, whose ``earliest_sequence`` is below ``sequence`` or ``sessions``. No number ever goes down.
    """

    sequence: int
    groups: dict[str, int] = msgspec.field(default_factory=dict)
    sessions: int = 0
