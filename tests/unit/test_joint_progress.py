"""The learner that asks for episodes waits for those that train from the same ones, by what they say of themselves."""

from __future__ import annotations

import math

import pytest

from fleetbus_schemas import Heartbeat
from fleetbus_workers.learner.joint_progress import JointProgress


def beat(policy: str = "solver", held: int = 0, seen: float = 0.0) -> Heartbeat:
    return Heartbeat(role="learner", worker="w", in_flight=held, counters={"groups_seen": seen}, policy=policy)


def test_the_slowest_learner_counts_with_what_it_holds_and_what_it_has_not_read() -> None:
    progress = JointProgress(["solver", "judge"])
    progress.begin(10)
    assert progress.count_outstanding(10) == 0
    assert progress.count_outstanding(14) == 4, "nobody has said that it read of them"
    progress.record(beat(held=3, seen=12))
    progress.record(beat("judge", held=1, seen=14))
    assert progress.count_outstanding(14) == 5
    progress.record(beat("default", held=99))
    assert progress.count_outstanding(14) == 5


@pytest.mark.parametrize(("held", "seen"), [(-9, 14.0), (0, math.inf), (0, math.nan), (0, -1.0)])
def test_a_heartbeat_of_impossible_numbers_changes_nothing(held: int, seen: float) -> None:
    progress = JointProgress(["solver"])
    progress.begin(10)
    progress.record(beat(held=2, seen=12))
    progress.record(beat(held=held, seen=seen))
    assert progress.count_outstanding(14) == 4


def test_a_run_of_one_policy_waits_for_nobody() -> None:
    assert JointProgress().count_outstanding(1000) == 0
