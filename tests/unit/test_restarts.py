"""The restart budget of a worker."""

from __future__ import annotations

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


def test_other_workers_achieve_what_they_did_themselves_in_all_their_starts() -> None:
    achieved = Achievements()
    for worker in ("environment-0", "environment-0-1", "environment-10"):
        achieved.apply(graded(worker))
    for actions in (3.0, 5.0):
        achieved.record_heartbeat(Heartbeat(role="inference", worker="inference-2", counters={"actions": actions}))
    assert [achieved.count(name) for name in ("environment-0", "environment-1", "environment-10")] == [2, 0, 1]
    assert [achieved.count(name) for name in ("inference", "inference-2")] == [5, 5]
    assert achieved.count("server") == 8


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
