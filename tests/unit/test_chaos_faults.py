"""The plan of faults: repeatable, as frequent as promised, and gentle with what there is only one of."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest

from benchmarks.chaos_faults import KILLS_APART, ROUND_SECONDS, plan_faults, plan_kills, plan_kills_by_policy


def test_the_same_seed_plans_the_same_faults_and_another_seed_others() -> None:
    assert plan_faults(1, 120) == plan_faults(1, 120)
    assert plan_faults(1, 120) != plan_faults(2, 120)


@pytest.mark.parametrize("seed", range(20))
def test_learner_and_server_are_struck_at_most_twice_and_killed_first(seed: int) -> None:
    faults = plan_faults(seed, 120)
    for role in ("learner", "server"):
        kinds = [fault.kind for fault in faults if fault.role == role]
        assert len(kinds) == 2
        assert kinds[0] == "kill"


def test_workers_are_struck_every_three_seconds_on_average_in_every_way() -> None:
    faults = [fault for seed in range(50) for fault in plan_faults(seed, 120) if fault.role in ("environment", "inference")]
    assert 50 * 120 / len(faults) == pytest.approx(3.0, rel=0.05)
    kinds = Counter((fault.role, fault.kind) for fault in faults)
    assert len(kinds) == 6
    assert min(kinds.values()) > 0.05 * len(faults)


def test_faults_come_in_order_and_within_the_time() -> None:
    times = [fault.at_seconds for fault in plan_faults(3, 60)]
    assert times == sorted(times)
    assert 0 <= times[0] <= times[-1] <= 60
    assert plan_faults(3, 0) == []


def test_kills_come_one_at_a_time_with_time_to_recover_between() -> None:
    kills = plan_kills(1, 240)
    assert {fault.kind for fault in kills} == {"kill"}
    assert {fault.role for fault in kills} == {role for role, _ in KILLS_APART}
    apart = dict(KILLS_APART)
    for fault, following in itertools.pairwise(kills):
        assert following.at_seconds - fault.at_seconds >= apart[fault.role]


def test_in_each_round_one_of_every_kind_is_killed_and_the_learners_in_turn() -> None:
    kills = plan_kills_by_policy(1, 60, ("default", "second"))
    assert kills == sorted(kills, key=lambda fault: fault.at_seconds)
    rounds = [list(group) for _, group in itertools.groupby(kills, key=lambda fault: fault.at_seconds // ROUND_SECONDS)]
    assert len(rounds) == 6
    for number, struck in enumerate(rounds):
        learner = ("default", "second")[number % 2]
        expected = {("learner", learner), ("environment", ""), ("inference", "default"), ("inference", "second")}
        assert {(fault.role, fault.policy) for fault in struck} == expected
        assert {fault.kind for fault in struck} == {"kill"}
