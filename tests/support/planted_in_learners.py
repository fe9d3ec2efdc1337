"""Faults to plant where two learners train their policies from the same episodes. See
`tests/system/test_simulation_planted_faults.py`.
"""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

import fleetbus_workers.learner.pool as pool
from fleetbus.core.training.own_seats import select_own_seats
from fleetbus.core.training.retention import Retention
from fleetbus_schemas import EpisodeFinished, EpisodeRequested
from fleetbus_workers.learner.joined_requests import JoinedRequests
from fleetbus_workers.learner.joint_progress import JointProgress


def turns_of_both_policies_trained(patch: pytest.MonkeyPatch) -> None:
    """A learner that joins trains what the policy of the one that asks played, too."""
    patch.setattr(pool, "select_own_seats", lambda result, policy: result if policy else select_own_seats(result, policy))


def reward_of_the_other_policy(patch: pytest.MonkeyPatch) -> None:
    """Each learner trains its seats by what those of the other one are worth."""

    def faulty(result: EpisodeFinished, policy: str) -> EpisodeFinished:
        rewards = [seat.reward for seat in result.seats]
        own = select_own_seats(result, policy)
        seats = tuple(
            seat if seat.reward is None or other is None else msgspec.structs.replace(seat, reward=other)
            for seat, other in zip(own.seats, reversed(rewards), strict=True)
        )
        return msgspec.structs.replace(own, seats=seats)

    patch.setattr(pool, "select_own_seats", faulty)


def settled_episodes_trained_after_a_resume(patch: pytest.MonkeyPatch) -> None:
    """A learner that joins forgets what its checkpoint says is settled."""
    init = JoinedRequests.__init__

    def faulty(self: JoinedRequests, groups: pool.GroupPool, **options: Any) -> None:
        groups._ledger._settled.clear()
        init(self, groups, **options)

    patch.setattr(JoinedRequests, "__init__", faulty)


def learners_behind_not_waited_for(patch: pytest.MonkeyPatch) -> None:
    """Who asks for episodes asks for as many as it can train itself."""
    patch.setattr(JointProgress, "count_outstanding", lambda self, next_group: 0)


def retention_by_one_of_two_policies(patch: pytest.MonkeyPatch) -> None:
    """What the policy that an episode was requested for has settled leaves the log."""
    enter = Retention._enter_request

    def faulty(self: Retention, sequence: int, request: EpisodeRequested) -> None:
        enter(self, sequence, msgspec.structs.replace(request, seats=()))

    patch.setattr(Retention, "_enter_request", faulty)
