"""The restart budget of a worker."""

from __future__ import annotations

from fleetbus_workers.up.restarts import (
    CRASHES_ALLOWED,
    LONGEST_DELAY_SECONDS,
    REFUSED_PATIENCE_SECONDS,
    WINDOW_SECONDS,
    RestartBudget,
)


def test_delays_double_until_there_were_too_many_crashes() -> None:
    budget = RestartBudget()
    assert [budget.delay_after_crash(float(second)) for second in range(CRASHES_ALLOWED)] == [0.25, 0.5, 1.0, 2.0, None]


def test_crashes_outside_the_window_are_forgiven() -> None:
    budget = RestartBudget()
    spaced = WINDOW_SECONDS / (CRASHES_ALLOWED - 1)
    delays = [budget.delay_after_crash(index * spaced) for index in range(50)]
    assert None not in delays
    assert max(delay for delay in delays if delay is not None) <= LONGEST_DELAY_SECONDS


def test_just_inside_the_window_they_are_not() -> None:
    budget = RestartBudget()
    spaced = WINDOW_SECONDS / (CRASHES_ALLOWED - 1) * 0.99
    assert budget.delay_after_crash(0.0) == 0.25
    assert [budget.delay_after_crash(index * spaced) for index in range(1, CRASHES_ALLOWED)][-1] is None


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
    budget.delay_after_crash(REFUSED_PATIENCE_SECONDS)
    assert budget.delay_after_refusal(2 * REFUSED_PATIENCE_SECONDS, has_worked=True) == LONGEST_DELAY_SECONDS
