"""Decides what an attempt does whose Action is late: wait, take it, send the Observation again, or stop. Pure.

Rule 6 of docs/concepts/delivery.md. A worker asks here twice: for many attempts with the last entries of their subjects,
and for one attempt with everything that stands on them, before it acts.
"""

from typing import Literal

import msgspec

CHECKS_UNTIL_STUCK = 2
"""By this check an inference worker has to work on a turn that stands on its lane."""

LateDecision = Literal["wait", "take", "resend", "superseded"]


class AskedTurn(msgspec.Struct, frozen=True, kw_only=True):
    """The Observation that awaits its Action: its position, what it expects before its Action on that one's subject, and which
    check this is."""

    observation_sequence: int
    action_sequence: int
    check: int


class LateFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The facts that were read about a turn. What was not asked for is given as it is while all is well.

    ``action_sequence`` is the last entry on the subject of the Action, ``queued_sequence`` that on the subject of the
    Observation, if it was sent to any worker, and ``acked_sequence`` up to where the queue of those is acked.
    """

    is_superseded: bool
    action_sequence: int
    is_answered: bool = False
    is_lane_usable: bool = True
    is_in_work: bool = True
    queued_sequence: int | None = None
    acked_sequence: int = 0


def decide_late_action(asked: AskedTurn, facts: LateFacts) -> LateDecision:
    """Decide what these facts mean for the turn."""
    if facts.is_superseded:
        return "superseded"
    if facts.is_answered:
        return "take"
    is_refused = facts.action_sequence != asked.action_sequence  # a late Action of an earlier attempt came between
    return "resend" if is_refused or _is_stuck(asked, facts) or _is_gone(asked, facts) else "wait"


def _is_stuck(asked: AskedTurn, facts: LateFacts) -> bool:
    """The worker of the lane is dead, drains, or is alive and has not taken the Observation."""
    return not facts.is_lane_usable or (not facts.is_in_work and asked.check >= CHECKS_UNTIL_STUCK)


def _is_gone(asked: AskedTurn, facts: LateFacts) -> bool:
    """Acked without an Action, or no longer in the log: no worker will be given this Observation any more."""
    queued = facts.queued_sequence
    return queued is not None and not queued >= asked.observation_sequence > facts.acked_sequence
