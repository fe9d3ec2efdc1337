"""The part of a result that one learner trains, where several policies played its episode. Pure.

The seats of other policies are to a learner as seats without a reward: their turns are in no sequence of its own, and their
rewards in no advantage. So all rules of seats that are never trained hold for them as they are.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from fleetbus_schemas import Action, EpisodeFinished, EpisodeSeat
from fleetbus_schemas.action import FinishReason
from fleetbus_schemas.seat import ELSEWHERE


def select_own_seats(result: EpisodeFinished, policy: str) -> EpisodeFinished:
    """The result as the learner of ``policy`` trains it; empty: the policy that the episode was requested for. A policy that is
    given and has no seat in the result sampled nothing that it could train: the result comes back without Actions."""
    if not policy and not any(seat.policy for seat in result.seats):
        return result
    own = [seat for seat in result.seats if seat.policy == policy]
    versions = {version for seat in own for version in seat.versions} if policy else result.policy_versions
    return msgspec.structs.replace(
        result,
        actions=() if policy and not own else result.actions,
        seats=tuple(seat if seat.policy == policy else _leave(seat) for seat in result.seats),
        policy_versions=tuple(sorted(versions)),
    )


def find_last_finish(result: EpisodeFinished, actions: Sequence[Action]) -> FinishReason:
    """The end of the last response of a seat that has a reward for this learner; "stop" if there is none."""
    unrewarded = result.unrewarded_turns
    own = (action for turn, action in reversed([*enumerate(actions)]) if turn not in unrewarded)
    return next((action.finish_reason for action in own), "stop")


def _leave(seat: EpisodeSeat) -> EpisodeSeat:
    return msgspec.structs.replace(seat, reward=None, reason=ELSEWHERE) if seat.reward is not None else seat
