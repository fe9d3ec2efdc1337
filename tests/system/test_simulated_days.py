"""Simulated days of a run with restarts of everything, and faults that only days show: `just week` plays seven."""

from __future__ import annotations

import resource
from collections.abc import Callable

import pytest

from tests.simulation.run import Report, run_seed
from tests.simulation.scenario.days import DAY_SECONDS, EVERY_HOURS, draw_days
from tests.simulation.timers import TIMERS, slowed_timers
from tests.simulation.week import LIMIT_SECONDS, main, stop_after
from tests.support import planted_in_days as planted

pytestmark = pytest.mark.integration

PLANTS: dict[Callable[[pytest.MonkeyPatch], None], str] = {
    planted.right_of_the_orphan_sweep_missing: "no fault ends a worker",
    planted.deadline_overflows_after_hours: "an outcome by deadline and grace",
    planted.nothing_trimmed: "the log is bounded",
    planted.checkpoints_never_removed: "checkpoints are pruned",
}
"""Faults, and the invariant that each breaks."""


def play(days: float) -> Report:
    return run_seed(1, scenario=draw_days(1, days))


@pytest.mark.timeout(300)
def test_a_day_with_restarts_of_every_role_and_of_the_server_keeps_all_invariants() -> None:
    report = play(1)
    assert report.violations == ()
    assert report.virtual_seconds >= DAY_SECONDS
    assert {"crash", "restart_server", "leave"} <= set(report.disturbances)
    assert all(report.started[role] > 2 for role in ("environment", "inference", "learner", "recorder"))
    assert min(report.started[role] for role in ("session_client", "gateway", "rollouts")) >= 1


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_seven_days_keep_all_invariants(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    assert "all invariants held; 7." in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.__name__)
def test_a_day_finds(plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """By the invariant that names the fault."""
    plant(monkeypatch)
    assert PLANTS[plant] in {violation.invariant for violation in play(1).violations}


def test_a_week_has_every_kind_of_fault_and_the_learner_is_away_for_half_a_day() -> None:
    faults = draw_days(1, 7).fault_schedule
    assert {(fault.kind, fault.role) for fault in faults} >= set(EVERY_HOURS)
    assert [fault.seconds for fault in faults if (fault.kind, fault.role) == ("leave", "learner")] == [DAY_SECONDS / 2]


def test_timers_are_what_they_were_after_a_run_of_days() -> None:
    before = [vars(module)[name] for module, name in TIMERS]
    with slowed_timers(10):
        assert [vars(module)[name] for module, name in TIMERS] == [10 * seconds for seconds in before]
    assert [vars(module)[name] for module, name in TIMERS] == before


def test_a_week_stops_by_itself_when_it_has_computed_for_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[tuple[int, tuple[int, int]]] = []
    monkeypatch.setattr(resource, "setrlimit", lambda kind, limit: limits.append((kind, limit)))
    stop_after(LIMIT_SECONDS)
    ((kind, (soft, _)),) = limits
    used = resource.getrusage(resource.RUSAGE_SELF)
    assert kind == resource.RLIMIT_CPU and abs(soft - used.ru_utime - used.ru_stime - LIMIT_SECONDS) < 5


@pytest.mark.parametrize("arguments", [["--days", "0"], ["--days", "x"], ["--seed", "-1"]])
def test_the_command_refuses_what_it_cannot_play(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    assert capsys.readouterr().err.count("\n") == 1
