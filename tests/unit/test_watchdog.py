"""The watchdog names every wait that can hold a whole run, and since when; and nothing while a run works, rests or begins."""

from __future__ import annotations

import anyio
import pytest
import trio.testing

from fleetbus.bus.memory import MemoryServer
from fleetbus.bus.streams import plan_run
from fleetbus_schemas import PolicyPublished, StepTrained, TrainingFinished, WorkerStopped, encode
from fleetbus_workers.environment.episode.stages import Stages
from fleetbus_workers.observe.run.run_observer import RunObserver
from fleetbus_workers.observe.run.state import RunState
from fleetbus_workers.observe.run.watchdog import MANY_BATCHES, MANY_WITHOUT_VERDICT, PAUSED, find_notes, find_stalls
from tests.support.scripted_run import SECOND, START, SUBJECTS, ScriptedRun


def test_a_run_that_works_rests_or_has_not_begun_is_not_stuck() -> None:
    run = ScriptedRun()
    assert run.stalls(10_000) == [], "nothing was asked for"
    assert find_stalls(run.state, run.health, now=START, now_ns=int(START * SECOND), stall_seconds=0.0) == []
    run.fleet(in_flight=1)
    run.request(20_000, "e1")
    run.claim(20_001, "e1")
    assert run.stalls(20_030) == []
    run.finish(20_050, "e1")
    assert run.stalls(90_000) == [], "a client has its result, and asks for no more"
    run.begin(90_000)
    assert run.stalls(90_059) == [], "a lineage that begins starts the clock anew"
    run.train(90_100, 1)
    assert run.stalls(90_159) == []
    run.add(90_200, SUBJECTS.train("default"), TrainingFinished(lineage="a", step=1, version=1))
    assert run.stalls(200_000) == []


def test_no_environment_worker_is_named_for_what_waits_and_for_what_ran_when_the_last_died() -> None:
    run = ScriptedRun()
    run.begin()
    run.alive("inference")
    run.alive("learner")
    run.request(10, "e1", "e2")
    stall = run.only(80)
    assert stall.where == "environment" and stall.seconds == 70
    assert "2 episodes waiting, 0 running, and no environment worker is alive" in stall.reason

    run.alive("environment", in_flight=2)
    run.claim(81, "e1", "e2")
    run.stalls(85)
    run.beats = [beat for beat in run.beats if beat.role != "environment"]
    stall = run.only(95)
    assert "0 episodes waiting, 2 running, and no environment worker is alive (env is silent for 10 s)" in stall.reason
    assert stall.seconds == 85 and "start `fleetbus environment`" in stall.advice


def test_workers_that_drain_take_nothing_new() -> None:
    run = ScriptedRun()
    run.fleet(in_flight=1, draining=True)
    run.request(0, "e1")
    assert "every environment worker is draining" in run.only(70).reason


def test_free_slots_that_nobody_takes_work_for_are_a_question_of_the_pool() -> None:
    run = ScriptedRun()
    run.fleet(in_flight=0)
    run.request(0, "e1")
    stall = run.only(70)
    assert stall.where == "environment" and "8 free slots take none" in stall.reason and "run.pool" in stall.advice


def test_no_inference_worker_is_named_with_the_last_words_of_the_last_one() -> None:
    run = ScriptedRun()
    run.fleet(in_flight=1)
    run.request(0, "e1")
    run.claim(1, "e1")
    run.stalls(50)
    run.beats = [beat for beat in run.beats if beat.role != "inference"]
    run.add(60, SUBJECTS.life("inference", "inf"), WorkerStopped(role="inference", worker="inf"))
    stall = run.only(75)
    assert stall.where == "inference" and "1 episodes run and no inference worker is alive (inf is stopped" in stall.reason


@pytest.mark.parametrize(("version", "have"), [(3, "the newest loaded version is 3"), (-1, "none has loaded a version")])
def test_a_version_that_nobody_loads_is_named(version: int, have: str) -> None:
    run = ScriptedRun()
    run.fleet(in_flight=1)
    run.alive("inference", version=version)
    published = PolicyPublished(policy="default", version=4, lineage="a", step=4, uri="u", manifest=(), size_bytes=1)
    run.add(0, SUBJECTS.policy("default"), published)
    run.request(0, "e1")
    run.claim(1, "e1")
    stall = run.only(75)
    assert stall.where == "inference" and f"no inference worker has loaded version 4 ({have})" in stall.reason


def test_an_engine_that_hangs_is_blamed_also_where_all_slots_are_taken() -> None:
    run = ScriptedRun()
    run.fleet(slots=1, in_flight=1, counters={"begun_action": 5.0, "ended_action": 4.0})
    run.alive("inference", in_flight=1)
    run.request(0, "e1", "e2")
    run.claim(1, "e1")
    stall = run.only(70)
    assert stall.where == "inference" and "1 episode waiting, 1 running; 1 observations are being answered" in stall.reason


def test_episodes_that_nobody_answers_ask_for_another_policy() -> None:
    run = ScriptedRun()
    run.fleet(in_flight=1, counters={"begun_action": 1.0})
    run.request(0, "e1")
    run.claim(1, "e1")
    stall = run.only(70)
    assert stall.where == "inference" and "1 wait for an action that no inference worker is computing" in stall.reason


def test_a_slow_verifier_is_named_with_the_group_that_waits_for_it() -> None:
    run = ScriptedRun()
    run.begin()
    run.fleet(in_flight=1, counters={"begun_verify": 4.0, "ended_verify": 3.0, "begun_step": 9.0, "ended_step": 9.0})
    run.request(0, "e1", "e2", "e3", "e4")
    run.claim(1, "e1", "e2", "e3", "e4")
    run.finish(10, "e1", "e2", "e3")
    stall = run.only(110)
    assert stall.where == "environment" and stall.seconds == 100
    assert "0 episodes waiting, 1 running, and none completes (1 in verify)" in stall.reason
    assert "group g1 waits for 1 of its 4: e4 on env" in stall.reason


def test_a_learner_that_asks_for_nothing_is_told_from_one_that_trains() -> None:
    run = ScriptedRun()
    run.begin()
    run.fleet()
    run.request(0, "e1")
    run.claim(1, "e1")
    run.finish(5, "e1")
    assert "it has 2 groups, so it should train" in run.only(70).reason
    run.alive("learner", slots=2, in_flight=1)
    stall = run.only(70)
    assert stall.where == "learner" and "nothing is admitted: it waits for a batch of 2 groups, has 1" in stall.reason
    assert stall.seconds == 65


def test_a_learner_that_never_asks_for_anything_is_named_from_its_beginning_on() -> None:
    run = ScriptedRun()
    run.begin(5)
    run.fleet()
    run.alive("learner", slots=2, in_flight=0)
    assert run.stalls(60) == []
    stall = run.only(75)
    assert stall.seconds == 70 and "nothing is admitted" in stall.reason


def test_no_learner_is_named_with_the_last_words_of_the_last_one() -> None:
    run = ScriptedRun()
    run.begin()
    run.fleet()
    run.stalls(10)
    run.beats = [beat for beat in run.beats if beat.role != "learner"]
    stall = run.only(70)
    assert stall.where == "learner" and "no learner is alive (lea is silent for 60 s)" in stall.reason


def test_a_full_log_is_named_before_what_waits_for_it() -> None:
    run = ScriptedRun()
    run.begin()
    run.fleet(in_flight=1)
    run.health.record_usage(720, 1_000, 1, START)
    assert "it is 72% full: new requests wait" in run.only(70).reason
    run.request(80, "e1")
    run.claim(81, "e1")
    assert run.only(145).where == "environment", "admitted work has its room"
    run.health.record_usage(960, 1_000, 1, START)
    stall = run.only(145)
    assert stall.where == "log" and "it is 96% full: messages of workers are refused" in stall.reason


def test_a_server_that_does_not_answer_is_named_with_since_when() -> None:
    run = ScriptedRun()
    run.health.record_failure("the NATS server does not answer", START + 30)
    run.health.record_failure("the NATS server does not answer", START + 32)
    stall = run.only(42)
    assert (stall.where, stall.seconds) == ("log", 12)
    run.health.record_usage(10, 1_000, 1, START + 50)
    assert run.stalls(51) == []


def test_episodes_that_all_fail_are_no_progress_however_many_end() -> None:
    run = ScriptedRun()
    run.begin()
    run.fleet(in_flight=1)
    for number in range(MANY_WITHOUT_VERDICT - 1):
        run.request(number, f"e{number}")
        run.finish(number + 80, f"e{number}", outcome="env_failed")
    assert run.stalls(100) == []
    run.request(100, "last", "open")
    run.finish(101, "last", outcome="timeout")
    stall = run.only(110)
    assert stall.where == "environment" and stall.seconds == 110
    assert (
        "none of the 16 episodes since the last step has a verdict: env_failed 15, timeout 1 (ConnectionError)" in stall.reason
    )
    run.finish(111, "open")
    assert run.stalls(112) == [], "one verdict, and there is something to learn from"


async def test_workers_count_what_is_in_a_stage_by_its_beginnings_and_ends() -> None:
    counters: dict[str, float] = {}
    stages = Stages(counters)
    with stages.time_limit("verify", 5):
        assert counters == {"begun_verify": 1.0}
    with pytest.raises(Exception, match="env_failed"), stages.time_limit("verify", 5):
        raise ValueError("no")
    assert counters == {"begun_verify": 2.0, "ended_verify": 2.0}


@pytest.mark.parametrize(
    "anyio_backend", [pytest.param(("trio", {"clock": trio.testing.MockClock(autojump_threshold=0)}), id="virtual time")]
)
async def test_a_log_that_never_rests_is_known_once_its_beginning_was_read() -> None:
    server = MemoryServer()
    async with server.connect("r", worker="w") as bus, anyio.create_task_group() as tasks:
        await bus.declare(plan_run("r", lanes=2))
        watch = RunObserver(bus, SUBJECTS, RunState(steps=1))
        assert watch.is_behind(anyio.current_time()), "nothing is known yet"

        async def go_on() -> None:
            for _ in range(10_000):
                beat = WorkerStopped(role="environment", worker="w")
                await bus.publish(SUBJECTS.life("environment", "w"), encode(beat))
                await anyio.sleep(0.1)

        tasks.start_soon(go_on)
        await anyio.sleep(30)
        tasks.start_soon(watch.run)
        await anyio.sleep(5)
        assert not watch.is_behind(anyio.current_time())
        assert watch.health.followed > 300
        tasks.cancel_scope.cancel()


def add_trained_step(run: ScriptedRun, at: float, step: int, *, success: float, flat: int = 16) -> None:
    """A step of sixteen groups of eight."""
    metrics = {"success": success, "reward": success, "groups_without_signal": float(flat)}
    metrics["advantage_size_mean"] = 0.0 if flat == 16 else 0.5
    episodes = tuple(f"{step}-{number}" for number in range(128))
    run.add(
        at, SUBJECTS.train("default"), StepTrained(lineage="a", step=step, version=step, episodes=episodes, metrics=metrics)
    )


def test_a_policy_that_collapsed_is_named_while_all_else_goes_well() -> None:
    run = ScriptedRun()
    run.begin()
    run.fleet()
    for step in range(1, 11):
        add_trained_step(run, step * 10, step, success=0.8, flat=4)
    for step in range(11, 17):
        assert run.stalls(step * 10 - 5) == [], "six steps, of ten seconds each, are needed"
        add_trained_step(run, step * 10, step, success=0.0)
    stall = run.only(171)
    assert (stall.where, stall.seconds) == ("policy", 61)
    assert "success fell from 0.80 to 0.00 within 1 step of step 10" in stall.reason
    assert "no signal since step 11: the last 96 groups had equal rewards each (success 0.00, reward 0.00)" in stall.reason
    assert "learner.max_grad_norm" in stall.advice
    add_trained_step(run, 175, 17, success=0.2, flat=8)
    add_trained_step(run, 176, 18, success=0.2, flat=8)
    assert run.stalls(176) == [], "it learns again"


def test_a_collapsed_policy_is_named_after_what_holds_the_run() -> None:
    run = ScriptedRun()
    run.begin()
    run.fleet()
    for step in range(1, 7):
        add_trained_step(run, step, step, success=0.0)
    run.request(10, "e1")
    run.beats = []
    assert [stall.where for stall in run.stalls(100)] == ["environment", "policy"]


def test_a_run_that_solved_its_tasks_is_no_trouble_and_worth_a_note() -> None:
    run = ScriptedRun()
    run.begin()
    run.fleet()
    for step in range(1, 11):
        add_trained_step(run, step * 10, step, success=1.0)
    assert run.stalls(110) == []
    (note,) = find_notes(run.state, now_ns=int((START + 110) * SECOND))
    assert note.startswith("no more to learn since step 1") and "harder tasks" in note
    run.add(120, SUBJECTS.train("default"), TrainingFinished(lineage="a", step=10, version=10))
    assert find_notes(run.state, now_ns=int((START + 300) * SECOND)) == []


def test_a_run_whose_groups_end_and_are_never_trained_is_named_with_why() -> None:
    run = ScriptedRun()
    run.begin()
    run.fleet()
    for number in range(MANY_BATCHES * 2):
        assert number < 10 or run.stalls(65) == [], "32 batches of groups may be replaced"
        ids = [f"{number}-{index}" for index in range(4)]
        run.request(number, *ids, group=f"g{number}")
        for index, episode in enumerate(ids):
            failed = number < 10 and index
            run.finish(number + 1, episode, outcome="env_failed" if failed else "completed", group=f"g{number}")
    stall = run.only(66)
    assert (stall.where, stall.seconds) == ("learner", 66)
    assert "no step was trained, though 64 groups ended since the last one: 54 had equal rewards, 10 fewer" in stall.reason
    run.train(67, 1)
    assert run.stalls(68) == []


def test_a_learner_that_was_paused_is_no_trouble_and_worth_a_note() -> None:
    run = ScriptedRun()
    run.begin()
    run.fleet()
    run.alive("learner", slots=2, in_flight=0, paused=True)
    assert run.stalls(75) == []
    assert find_notes(run.state, now_ns=75 * 10**9) == [PAUSED]
