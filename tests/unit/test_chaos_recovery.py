"""Recovery times as they are read from a log: who held what when it was killed, and when that went on elsewhere."""

from __future__ import annotations

import math

import pytest

from benchmarks.chaos_processes import InjectedFault
from benchmarks.chaos_recovery import Entry, Heard, Recovery, compute_percentiles
from fleetbus_schemas import (
    Action,
    AttemptReleased,
    AttemptStarted,
    EpisodeFinished,
    Heartbeat,
    LineageStarted,
    Message,
    Observation,
    StepTrained,
    WorkerStarted,
)

SECOND = 10**9


def entry(seconds: float, message: Message, subject: str = "fb.r.x.y") -> Entry:
    return Entry(int(seconds * SECOND), subject, message)


def claim(seconds: float, episode: str, attempt: int, worker: str) -> Entry:
    return entry(
        seconds, AttemptStarted(episode_id=episode, attempt=attempt, worker=worker, nonce=f"{worker}{attempt}", lane="e0")
    )


def result(seconds: float, episode: str, attempt: int, worker: str) -> Entry:
    finished = EpisodeFinished(
        episode_id=episode, group_id="g", attempt=attempt, outcome="completed", worker=worker, reward=1.0
    )
    return entry(seconds, finished)


def observation(seconds: float, episode: str, lane: str, hop: int = 0) -> Entry:
    asked = Observation(
        episode_id=episode,
        attempt=1,
        turn=0,
        hop=hop,
        policy="p",
        messages=(),
        tokens_left=9,
        environment_lane="e0",
        deadline_ns=9,
    )
    return entry(seconds, asked, f"fb.r.obs.p.{lane}.{episode}")


def action(seconds: float, episode: str, worker: str) -> Entry:
    return entry(seconds, Action(episode_id=episode, attempt=1, turn=0, text="", worker=worker))


def kill(role: str, name: str, seconds: float, *held: str) -> InjectedFault:
    return InjectedFault(role=role, kind="kill", name=name, time_ns=int(seconds * SECOND), held=held)


def test_an_episode_of_a_killed_worker_has_recovered_at_its_next_claim() -> None:
    log = [claim(1, "a", 1, "env-0"), claim(2, "b", 1, "env-1"), claim(15, "a", 2, "env-1"), result(16, "a", 2, "env-1")]
    assert Recovery(log, [kill("environment", "env-0", 5)]).environment() == [10.0]


def test_an_episode_that_had_ended_or_was_handed_back_before_the_kill_was_not_held() -> None:
    released = entry(2, AttemptReleased(episode_id="b", attempt=1, worker="env-0"))
    log = [
        claim(1, "a", 1, "env-0"),
        result(2, "a", 1, "env-0"),
        claim(1, "b", 1, "env-0"),
        released,
        claim(9, "b", 2, "env-1"),
    ]
    assert Recovery(log, [kill("environment", "env-0", 5)]).environment() == []


def test_an_episode_that_never_goes_on_counts_as_never_recovered() -> None:
    assert Recovery([claim(1, "a", 1, "env-0")], [kill("environment", "env-0", 5)]).environment() == [math.inf]


def test_a_kill_is_undisturbed_when_all_others_of_its_role_and_the_server_are_there_until_the_limit() -> None:
    def pause(role: str, name: str, begin: int, end: int) -> InjectedFault:
        return InjectedFault(role=role, kind="pause", name=name, time_ns=begin * SECOND, back_ns=end * SECOND)

    log = [claim(1, "a", 1, "env-0-0"), claim(15, "a", 2, "env-1-0")]
    injected = kill("environment", "env-0-0", 5)
    again = entry(21, WorkerStarted(role="environment", worker="env-1-1"))

    def counted(*others: InjectedFault) -> int:
        return len(Recovery([*log, again], [injected, *others]).environment(undisturbed=True))

    assert counted(pause("environment", "env-1-0", 1, 4), pause("environment", "env-1-0", 18, 19)) == 1
    assert counted(pause("inference", "inf-0-0", 6, 7)) == 1
    assert counted(pause("environment", "env-1-0", 4, 6)) == 0
    assert counted(pause("server", "server", 16, 18)) == 0
    assert counted(kill("environment", "env-1-0", 20)) == 1
    assert counted(kill("environment", "env-1-0", 3)) == 0


def test_turns_that_a_killed_worker_held_or_that_wait_on_its_lane_recover_at_their_action() -> None:
    log = [
        entry(0, WorkerStarted(role="inference", worker="inf-0", lane="i0")),
        observation(1, "held", "any"),
        observation(1, "waiting", "i0"),
        observation(1, "elsewhere", "any"),
        observation(1, "answered", "i0"),
        action(2, "answered", "inf-0"),
        observation(7, "waiting", "any", hop=1),
        action(8, "waiting", "inf-1"),
        action(9, "held", "inf-1"),
        action(30, "elsewhere", "inf-1"),
    ]
    assert sorted(Recovery(log, [kill("inference", "inf-0", 5, "held.1.0")]).inference()) == [3.0, 4.0]


def test_a_turn_whose_attempt_was_superseded_has_no_action_to_wait_for() -> None:
    log = [claim(0, "held", 1, "env-0"), observation(1, "held", "any"), claim(9, "held", 2, "env-1")]
    assert Recovery(log, [kill("inference", "inf-0", 5, "held.1.0")]).inference() == []


def test_a_learner_trains_again_at_the_first_step_of_another_lineage() -> None:
    def step(seconds: float, lineage: str, number: int) -> Entry:
        return entry(seconds, StepTrained(lineage=lineage, step=number, version=number, episodes=()))

    log = [step(1, "l1", 1), step(5.1, "l1", 2), step(14, "l2", 2)]
    assert Recovery(log, [kill("learner", "learner-0", 5)]).learner() == [pytest.approx(9.0)]


def test_after_a_server_restart_a_worker_is_at_work_when_it_stores_something_or_says_that_it_is_idle() -> None:
    fault = InjectedFault(
        role="server",
        kind="kill",
        name="server",
        time_ns=5 * SECOND,
        back_ns=7 * SECOND,
        alive=("env-0", "inf-0", "env-1", "learner"),
    )
    log = [
        entry(0, WorkerStarted(role="environment", worker="env-0")),
        entry(0, WorkerStarted(role="environment", worker="env-1")),
        entry(0, WorkerStarted(role="inference", worker="inf-0")),
        entry(0, LineageStarted(lineage="l1", worker="learner")),
        claim(9, "a", 1, "env-0"),
        result(30, "b", 1, "env-1"),
    ]
    heard = [
        Heard(8 * SECOND, Heartbeat(role="environment", worker="env-0", in_flight=1)),
        Heard(10 * SECOND, Heartbeat(role="inference", worker="inf-0")),
        Heard(11 * SECOND, Heartbeat(role="learner", worker="learner", in_flight=3)),
    ]
    other = kill("environment", "env-1", 8)
    assert sorted(Recovery(log, [fault, other], heard).server()) == [2.0, 3.0, 4.0]


def test_percentiles_are_of_nearest_rank_and_count_what_never_recovered() -> None:
    assert compute_percentiles(float(value) for value in range(1, 101)) == {
        "count": 100,
        "never": 0,
        "p50": 50.0,
        "p99": 99.0,
        "max": 100.0,
    }
    assert compute_percentiles([1.0, math.inf]) == {"count": 2, "never": 1, "p50": 1.0, "p99": None, "max": None}
    assert compute_percentiles([]) == {"count": 0, "never": 0, "p50": None, "p99": None, "max": None}
