"""The restart budget of a worker."""

from __future__ import annotations

import math

import pytest

from fleetbus_schemas import EpisodeFinished, EvaluationFinished, Heartbeat, StepTrained
from fleetbus_workers.up.restarts import (
    CRASHES_ALLOWED,
    LONGEST_DELAY_SECONDS,
    REFUSED_PATIENCE_SECONDS,
    Achievements,
    RestartBudget,
)


def step(number: int, lineage: str = "l") -> StepTrained:
    return StepTrained(lineage=lineage, step=number, version=number, episodes=())


def graded(worker: str) -> EpisodeFinished:
    return EpisodeFinished(episode_id="e", group_id="g", attempt=1, outcome="completed", worker=worker, reward=1.0)


def test_delays_double_until_there_were_too_many_crashes() -> None:
    budget = RestartBudget()
    assert [budget.delay_after_crash(0.0) for _ in range(CRASHES_ALLOWED)] == [0.25, 0.5, 1.0, 2.0, None]


def test_crashes_before_something_was_achieved_are_forgiven() -> None:
    budget = RestartBudget()
    assert [budget.delay_after_crash(float(steps)) for steps in range(50)] == [0.25] * 50
    assert [budget.delay_after_crash(49.0) for _ in range(4)] == [0.5, 1.0, 2.0, None]


def test_a_learner_achieves_steps_that_no_one_reached_before_and_evaluations() -> None:
    achieved = Achievements()
    for message in (step(11), step(12), step(11, "m"), step(12, "m")):
        achieved.apply(message)
    assert achieved.count("learner") == 12
    evaluated = EvaluationFinished(
        lineage="l", step=12, version=12, name="step12", episodes=1, graded=1, success=1.0, mean_reward=1.0, temperature=1.0
    )
    achieved.apply(evaluated)
    achieved.apply(evaluated)
    assert achieved.count("learner") == 13


def sampled(worker: str, actions: float) -> Heartbeat:
    return Heartbeat(role="inference", worker=worker, counters={"actions": actions})


def test_other_workers_achieve_what_they_did_themselves_in_all_their_starts() -> None:
    achieved = Achievements(["environment-0", "environment-1", "inference"])
    for worker in ("environment-0", "environment-0-1", "environment-10"):
        achieved.apply(graded(worker))
    for worker, actions in (("inference", 3.0), ("inference", 5.0), ("inference", 5.0), ("inference-2", 0.0)):
        achieved.record_heartbeat(sampled(worker, actions))
    assert [achieved.count(name) for name in ("environment-0", "environment-1", "inference")] == [2, 0, 2]
    achieved.record_heartbeat(sampled("inference-2", 5.0))
    assert achieved.count("inference") == 3
    assert achieved.count("server") == 6, "an environment worker that somebody else started is one of the run, too"


@pytest.mark.parametrize("forged", [math.inf, math.nan, 1e300])
def test_no_number_of_actions_keeps_those_after_it_from_being_an_achievement(forged: float) -> None:
    achieved, budget = Achievements(["inference"]), RestartBudget()
    for number in range(2 * CRASHES_ALLOWED):
        achieved.record_heartbeat(sampled("inference", forged))
        achieved.record_heartbeat(sampled("inference", float(number + 1)))
        assert budget.delay_after_crash(achieved.count("inference")) is not None


def test_invented_workers_are_counted_together_and_achieve_nothing_for_those_of_another_role() -> None:
    achieved = Achievements(["environment", "inference"])
    for number in range(1000):
        achieved.apply(graded(f"ghost-{number}"))
        achieved.apply(graded("inference"))
        achieved.record_heartbeat(sampled(f"ghost-{number}", 1.0))
    assert [achieved.count("environment"), achieved.count("inference")] == [0, 0]
    assert len(achieved._achieved) + len(achieved._sampled) < 6


def test_a_worker_that_never_worked_and_refuses_is_given_up_at_once() -> None:
    assert RestartBudget().delay_after_refusal(0.0, has_worked=False) is None


def test_a_worker_that_worked_and_refuses_is_tried_for_a_while() -> None:
    budget = RestartBudget()
    assert budget.delay_after_crash(0.0) == 0.25
    times = [10.0, 10.0 + REFUSED_PATIENCE_SECONDS, 11.0 + REFUSED_PATIENCE_SECONDS]
    assert [budget.delay_after_refusal(now, has_worked=True) for now in times] == [LONGEST_DELAY_SECONDS] * 2 + [None]


def test_a_worker_that_began_again_has_all_patience_again() -> None:
    budget = RestartBudget()
    budget.delay_after_refusal(0.0, has_worked=True)
    budget.delay_after_crash(0.0)
    assert budget.delay_after_refusal(2 * REFUSED_PATIENCE_SECONDS, has_worked=True) == LONGEST_DELAY_SECONDS
