"""A run that is over is told from one that is stuck: since when, how it ended, and how it goes on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from fleetbus.bus.memory import MemoryServer
from fleetbus_schemas import TrainingFinished, WorkerFailed, WorkerStarted, WorkerStopped
from fleetbus_workers.observe.run.resume_command import build_resume_command
from fleetbus_workers.observe.run.run_observer import ALIVE, RESUME_SECONDS, RunObserver
from fleetbus_workers.observe.run.termination import Driver, Termination, detect_termination
from tests.support.scripted_run import SECOND, START, SUBJECTS, ScriptedRun

RETRIED_REFUSALS = Driver()
NOT_DRIVEN = Driver(is_driving=lambda: False, command="fleetbus up --run r")
DRIVEN = Driver(is_driving=lambda: True, command="fleetbus up --run r")


def ending(run: ScriptedRun, at: float, driver: Driver) -> Termination | None:
    now = START + at
    for beat in run.beats:
        run.state.worker_registry.record_heartbeat(beat, now)
    return detect_termination(
        run.state.termination_state,
        driver,
        is_silent=bool(run.health.problem),
        is_anybody_alive=any(row.state in ALIVE for row in run.state.worker_registry.rows(now)),
        last_time_ns=run.state.last_time_ns,
        step=run.state.progress.step,
        steps=run.state.progress.steps,
        now_ns=int(now * SECOND),
    )


def trained(*, alive: bool = False) -> ScriptedRun:
    run = ScriptedRun()
    run.add(0, SUBJECTS.life("learner", "lea"), WorkerStarted(role="learner", worker="lea"))
    run.begin()
    run.fleet()
    run.train(50, 3)
    if not alive:
        run.stalls(60)
        run.beats = []
    return run


def stopped() -> ScriptedRun:
    run = trained()
    run.add(61, SUBJECTS.life("learner", "lea"), WorkerStopped(role="learner", worker="lea"))
    return run


def test_how_a_learner_failed_is_one_line_whatever_it_says() -> None:
    run = trained()
    failed = WorkerFailed(role="learner", worker="lea", error_class="E", error="x\nover: its training finished\ny")
    run.add(61, SUBJECTS.life("learner", "lea"), failed)
    ended = ending(run, 100, NOT_DRIVEN)
    assert ended is not None and len(ended.line.splitlines()) == 1 and "its learner failed" in ended.line


@pytest.mark.parametrize("driver", [RETRIED_REFUSALS, NOT_DRIVEN, DRIVEN])
def test_a_run_whose_training_finished_is_over_also_where_workers_live_and_where_the_server_is_gone(driver: Driver) -> None:
    run = trained(alive=True)
    run.add(100, SUBJECTS.train("default"), TrainingFinished(lineage="a", step=3, version=3))
    for problem in "", "the NATS server does not answer":
        if problem:
            run.health.record_failure(problem, START + 150)
        found = ending(run, 161, driver)
        assert found is not None and (found.how, found.seconds) == ("finished", 61)
        assert found.line.startswith("over: its training finished 1 min 1 s ago (1970-01-01 00:18 UTC) at step 3")
        assert ("`fleetbus up --run r --steps 53` trains it further" in found.line) == bool(driver.command)
        assert run.stalls(161) == [], "it waits for nothing"
    run.begin(170)
    assert ending(run, 171, driver) is None, "it is trained further"


def test_a_run_that_was_stopped_in_order_is_over_and_says_what_resumes_it() -> None:
    found = ending(stopped(), 181, NOT_DRIVEN)
    assert found is not None and (found.how, found.seconds) == ("stopped", 120)
    assert found.line == (
        "over: it was stopped normally 2 min 0 s ago (1970-01-01 00:17 UTC) at step 3 of 10; `fleetbus up --run r` resumes it"
    )
    far = ending(stopped(), 181, RETRIED_REFUSALS)
    assert far is not None and far.line.endswith("start its workers again: it resumes from its checkpoint")


def test_a_run_that_is_being_resumed_is_not_over() -> None:
    assert ending(stopped(), 70, DRIVEN) is None, "the roles are being started"
    run = stopped()
    run.add(80, SUBJECTS.life("learner", "new"), WorkerStarted(role="learner", worker="new"))
    assert ending(run, 90, RETRIED_REFUSALS) is None


def test_a_server_that_ends_after_the_goodbyes_is_no_trouble_even_before_its_address_is_withdrawn() -> None:
    run = stopped()
    run.health.record_failure("the NATS server does not answer", START + 65)
    found = ending(run, 70, DRIVEN)
    assert found is not None and found.how == "stopped"


def test_a_server_that_falls_silent_while_nobody_said_goodbye_is_trouble() -> None:
    run = trained()
    run.health.record_failure("the NATS server does not answer", START + 65)
    assert ending(run, 70, DRIVEN) is None and ending(run, 70, RETRIED_REFUSALS) is None
    assert run.only(70).where == "log"


def test_workers_that_go_on_without_the_learner_keep_a_run_from_being_over() -> None:
    run = trained(alive=True)
    run.beats = [beat for beat in run.beats if beat.role != "learner"]
    run.add(61, SUBJECTS.life("learner", "lea"), WorkerStopped(role="learner", worker="lea"))
    assert ending(run, 200, RETRIED_REFUSALS) is None
    assert "no learner is alive (lea is stopped" in run.only(200).reason


def test_a_learner_that_failed_is_named_with_what_it_failed_of() -> None:
    run = trained()
    failed = WorkerFailed(role="learner", worker="lea", error_class="ValueError", error="no such file")
    run.add(61, SUBJECTS.life("learner", "lea"), failed)
    found = ending(run, 121, NOT_DRIVEN)
    assert found is not None and found.how == "failed"
    assert "its learner failed 1 min 0 s ago" in found.line and "(ValueError: no such file)" in found.line


def test_a_run_that_was_killed_is_over_since_its_last_entry() -> None:
    run = trained()
    found = ending(run, 3650, NOT_DRIVEN)
    assert found is not None and (found.how, found.seconds) == ("gone", 3600)
    assert "over: it ended 1 h ago (1970-01-01 00:17 UTC) at step 3 of 10 without a stop message" in found.line
    assert ending(run, 3650, RETRIED_REFUSALS) is None, "its workers may only be out of reach"
    assert ending(ScriptedRun(), 10, NOT_DRIVEN) is not None, "nothing was ever stored"


def test_the_command_that_goes_on_names_run_and_folder_where_they_are_not_the_defaults(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert build_resume_command("default", ".fleetbus/runs") == "fleetbus up"
    assert build_resume_command("default", tmp_path / ".fleetbus" / "runs") == "fleetbus up"
    assert build_resume_command("a", "my runs") == "fleetbus up --run a --run-folder 'my runs'"
    assert build_resume_command("a", tmp_path / "runs") == "fleetbus up --run a --run-folder runs"
    assert build_resume_command("default", "/elsewhere") == "fleetbus up --run-folder /elsewhere"


@pytest.mark.parametrize("left", [stopped, trained])
async def test_a_run_that_up_resumes_after_hours_is_not_stuck_until_its_learner_had_time_to_come_back(
    left: Callable[[], ScriptedRun],
) -> None:
    async with MemoryServer().connect("r", worker="w") as bus:
        run = left()
        watch = RunObserver(bus, SUBJECTS, run.state, DRIVEN)
        watch.is_behind = lambda now: False  # type: ignore[method-assign]
        later = START + 10_000
        assert run.stalls(10_000), "the last progress is long ago"
        assert not watch.may_be_stuck(later) and not watch.may_be_stuck(later + RESUME_SECONDS - 1)
        assert watch.may_be_stuck(later + RESUME_SECONDS)
        run.add(10_200, SUBJECTS.life("learner", "new"), WorkerStarted(role="learner", worker="new"))
        assert watch.may_be_stuck(later + 201)
