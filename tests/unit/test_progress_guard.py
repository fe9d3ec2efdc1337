"""Lines of `up` about failures, and the end of a run that cannot progress."""

from __future__ import annotations

import math
from typing import Any

import pytest

from fleetbus.config.settings import LimitSettings
from fleetbus.core.episode.history import Turn
from fleetbus_schemas import (
    Action,
    EpisodeFinished,
    Heartbeat,
    Outcome,
    PolicyPublished,
    StepTrained,
    WorkerFailed,
    WorkerStarted,
    WorkerStopped,
)
from fleetbus_workers.environment.episode.conclusion import NO_CALL_READ, Conclusion, note_unread
from fleetbus_workers.up.progress_guard import ProgressGuard

LIMITS = LimitSettings(ungraded_episodes=8, no_progress=100.0)


def finished(number: int, outcome: Outcome = "env_failed", **fields: object) -> EpisodeFinished:
    given = {"error_class": "KeyError", "error": "step: no such room", "error_location": "my_game.py:27 in MyGame.step"}
    facts = given | fields if outcome != "completed" else {"reward": 1.0}
    return EpisodeFinished(episode_id=f"e{number}", group_id="g", attempt=1, outcome=outcome, worker="w", **facts)  # type: ignore[arg-type]


def test_a_kind_of_failure_is_said_once_with_its_count_and_traceback_and_again_at_the_end() -> None:
    guard = ProgressGuard(LIMITS, 0.0)
    for number in range(3):
        guard.apply(finished(number, traceback="Traceback\n  line" if number == 0 else ""), 0.0)
    assert guard.take_lines(0.1) == []
    assert guard.take_lines(1.2) == [
        "3 episodes ended env_failed KeyError: step: no such room (my_game.py:27 in MyGame.step)",
        "  | Traceback",
        "  |   line",
    ]
    guard.apply(finished(3), 2.0)
    assert guard.take_lines(9.0) == []
    assert guard.take_final_lines() == [
        "in all, 4 episodes ended env_failed KeyError: step: no such room (my_game.py:27 in MyGame.step)"
    ]


def test_failures_of_other_places_are_other_kinds_and_stale_or_cancelled_episodes_none() -> None:
    guard = ProgressGuard(LIMITS, 0.0)
    for number, outcome in enumerate(("env_failed", "stale", "cancelled", "completed")):
        guard.apply(finished(number, outcome), 0.0)  # type: ignore[arg-type]
    guard.apply(finished(9, error_location="my_game.py:31 in MyGame.step"), 0.0)
    guard.take_lines(0.0)
    assert len(guard.take_lines(1.0)) == 2


def test_so_many_episodes_in_a_row_without_a_grade_end_the_run_with_the_cause() -> None:
    guard = ProgressGuard(LIMITS, 0.0)
    for number in range(7):
        guard.apply(finished(number), 1.0)
    assert guard.find_stall(1.0) is None
    guard.apply(finished(7), 1.0)
    stall = guard.find_stall(1.0)
    assert stall is not None
    assert "8 episodes in a row ended without a grade (limits.ungraded_episodes)" in str(stall)
    assert "KeyError: step: no such room (my_game.py:27 in MyGame.step)" in str(stall)


def test_a_run_that_had_a_grade_gets_as_long_as_any_other_to_progress() -> None:
    """A platform may be away for a minute, in which hundreds of episodes fail."""
    guard = ProgressGuard(LIMITS, 0.0)
    guard.apply(finished(0, "completed"), 10.0)
    for number in range(1, 50):
        guard.apply(finished(number), 11.0)
    assert guard.find_stall(109.0) is None
    assert "49 episodes in a row" in str(guard.find_stall(110.0))


def test_nothing_is_ended_where_the_settings_say_never() -> None:
    guard = ProgressGuard(LimitSettings(ungraded_episodes=0, no_progress=0.0), 0.0)
    for number in range(500):
        guard.apply(finished(number), 1.0)
    assert guard.find_stall(1e9) is None


def test_a_problem_of_a_worker_is_said_once_and_is_the_cause_when_nothing_progresses() -> None:
    guard = ProgressGuard(LIMITS, 0.0)
    for now in range(0, 100, 2):
        guard.record_heartbeat(Heartbeat(role="inference", worker="inference", problem="weights rejected: sha256"), float(now))
    assert guard.take_lines(99.0) == ["inference: weights rejected: sha256"]
    assert guard.find_stall(99.0) is None
    assert "nothing progressed for 100 s (limits.no_progress): inference: weights rejected" in str(guard.find_stall(100.0))


def test_sampled_actions_trained_steps_and_a_learner_that_trains_are_progress() -> None:
    guard = ProgressGuard(LIMITS, 0.0)
    guard.record_heartbeat(Heartbeat(role="inference", worker="i", counters={"actions": 3.0}), 90.0)
    assert guard.find_stall(180.0) is None
    guard.apply(StepTrained(lineage="l", step=1, version=1, episodes=()), 180.0)
    assert guard.find_stall(270.0) is None
    guard.record_heartbeat(Heartbeat(role="learner", worker="l", counters={"begun_work": 2.0, "ended_work": 1.0}), 270.0)
    assert guard.find_stall(369.0) is None


@pytest.mark.parametrize("forged", [math.inf, math.nan])
def test_no_number_of_actions_keeps_those_after_it_from_being_progress(forged: float) -> None:
    guard = ProgressGuard(LIMITS, 0.0)
    for actions, now in ((forged, 0.0), (3.0, 90.0), (3.0, 120.0)):
        guard.record_heartbeat(Heartbeat(role="inference", worker="i", counters={"actions": actions}), now)
    assert guard.find_stall(189.0) is None
    assert guard.find_stall(190.0) is not None


def test_a_learner_that_starts_and_publishes_again_and_again_is_no_progress() -> None:
    guard = ProgressGuard(LIMITS, 0.0)
    for now in (0, 40, 80):
        guard.apply(WorkerStarted(role="learner", worker=f"learner-{now}"), float(now))
        guard.apply(
            PolicyPublished(policy="p", lineage="l", version=now, step=10, uri="x", manifest=(), size_bytes=0), float(now)
        )
    assert guard.find_stall(99.0) is None
    assert guard.find_stall(100.0) is not None
    guard.apply(StepTrained(lineage="l", step=11, version=1, episodes=()), 100.0)
    guard.apply(WorkerStarted(role="learner", worker="learner-5"), 150.0)
    assert guard.find_stall(249.0) is None


def test_a_learner_that_waits_for_episodes_is_no_progress() -> None:
    guard = ProgressGuard(LIMITS, 0.0)
    for now in range(0, 101, 2):
        beat = Heartbeat(role="learner", worker="l", slots=4, in_flight=4, counters={"begun_work": 2.0, "ended_work": 2.0})
        guard.record_heartbeat(beat, float(now))
    assert guard.find_stall(100.0) is not None


def test_a_learner_that_has_trained_and_waits_for_room_in_the_log_is_no_progress() -> None:
    guard = ProgressGuard(LIMITS, 0.0)
    for now in range(0, 101, 2):
        guard.record_heartbeat(
            Heartbeat(role="learner", worker="l", problem="the log is full", counters={"begun_work": 1.0}), float(now)
        )
    assert "nothing progressed for 100 s (limits.no_progress): l: the log is full" in str(guard.find_stall(100.0))


def test_a_worker_that_falls_silent_is_said_once_and_one_that_said_goodbye_is_not() -> None:
    guard = ProgressGuard(LIMITS, 0.0)
    for worker in ("e", "f"):
        guard.record_heartbeat(Heartbeat(role="environment", worker=worker), 0.0)
    guard.apply(WorkerStopped(role="environment", worker="f"), 1.0)
    assert guard.take_lines(7.0) == []
    assert guard.take_lines(9.0) == ["e: no heartbeat for 8 s: it is blocked, suspended or dead"]
    assert guard.take_lines(20.0) == []


def test_a_heartbeat_that_is_read_after_its_workers_goodbye_makes_no_silent_worker_of_it() -> None:
    guard = ProgressGuard(LIMITS, 0.0)
    guard.apply(WorkerStopped(role="environment", worker="e"), 1.0)
    guard.record_heartbeat(Heartbeat(role="environment", worker="e", problem="x"), 1.5)
    hear(guard, "f", 2, 200)
    assert guard.take_lines(200.0) == [] == guard.take_hung(200.0)


def test_a_worker_that_starts_again_under_its_name_is_watched_again() -> None:
    guard = ProgressGuard(LIMITS, 0.0)
    guard.apply(WorkerStopped(role="environment", worker="e"), 1.0)
    guard.apply(WorkerStarted(role="environment", worker="e"), 2.0)
    guard.record_heartbeat(Heartbeat(role="environment", worker="e"), 3.0)
    assert guard.take_lines(12.0) == ["e: no heartbeat for 8 s: it is blocked, suspended or dead"]


def test_a_goodbye_in_the_name_of_a_worker_that_beats_on_is_forgotten() -> None:
    guard = ProgressGuard(LIMITS, 0.0)
    guard.apply(WorkerStopped(role="environment", worker="e"), 1.0)
    assert guard.take_lines(10.0) == []
    guard.record_heartbeat(Heartbeat(role="environment", worker="e"), 11.0)
    assert guard.take_lines(20.0) == ["e: no heartbeat for 8 s: it is blocked, suspended or dead"]


def hear(guard: ProgressGuard, worker: str, since: float, until: float) -> None:
    for now in range(int(since), int(until) + 1, 2):
        guard.record_heartbeat(Heartbeat(role="environment", worker=worker), float(now))


def test_a_worker_that_hangs_while_others_are_heard_is_named_once() -> None:
    guard = ProgressGuard(LIMITS, 0.0)
    guard.record_heartbeat(Heartbeat(role="environment", worker="e"), 0.0)
    hear(guard, "f", 0, 118)
    assert guard.take_hung(119.0) == []
    hear(guard, "f", 120, 130)
    assert guard.take_hung(130.0) == [("environment", "e")]
    assert guard.take_hung(131.0) == []


def test_a_server_that_was_away_makes_no_worker_hang() -> None:
    guard = ProgressGuard(LIMITS, 0.0)
    for worker in ("e", "f"):
        hear(guard, worker, 0, 10)
    assert guard.take_hung(600.0) == []
    hear(guard, "f", 600, 602)
    assert guard.take_hung(603.0) == [], "the other one connects again a moment later"
    hear(guard, "f", 604, 722)
    assert guard.take_hung(723.0) == [("environment", "e")]


def test_episodes_that_end_in_their_first_turn_for_want_of_tokens_are_said_once_with_the_remedy() -> None:
    guard = ProgressGuard(LIMITS, 0.0)
    note = "its tokens were used up in turn 1 of 5: the first prompt took 937 of 1,024 (episode.max_episode_tokens)"
    for number in range(20):
        guard.apply(
            EpisodeFinished(
                episode_id=f"e{number}",
                group_id="g",
                attempt=1,
                outcome="truncated",
                worker="w",
                error_class="tokens",
                note=note,
                reward=0.0,
                turns=1,
            ),
            0.0,
        )
    (line,) = guard.take_lines(0.0)
    assert line.startswith("8 of 8 episodes had no room") and "937 of 1,024" in line
    assert "raise episode.max_episode_tokens" in line


def test_episodes_whose_prompt_leaves_no_room_for_a_turn_are_a_failure_though_they_have_a_grade() -> None:
    guard = ProgressGuard(LIMITS, 0.0)
    error = "the prompt leaves no room for a turn: the prompt has 5,012 tokens; the model takes 1,024 (inference.max_model_len)"
    for number in range(8):
        guard.apply(finished(number, "truncated", error_class="tokens", error=error, error_location="", reward=0.0), 0.0)
    guard.take_lines(0.0)
    (line,) = guard.take_lines(1.5)
    assert line.startswith("8 episodes ended truncated tokens: the prompt leaves no room") and "5,012" in line
    assert "the prompt has 5,012 tokens" in str(guard.find_stall(1.5))


def test_a_run_that_somebody_paused_is_not_ended_for_want_of_progress_and_the_pause_is_said() -> None:
    guard = ProgressGuard(LIMITS, 0.0)
    for second in range(0, 300, 2):
        guard.record_heartbeat(Heartbeat(role="learner", worker="l", paused=True), float(second))
    assert guard.find_stall(300.0) is None
    assert guard.take_lines(300.0) == ["admission is paused by request"]
    guard.record_heartbeat(Heartbeat(role="learner", worker="l"), 300.0)
    assert guard.take_lines(301.0) == ["admission is resumed"]
    assert guard.find_stall(401.0) is not None


@pytest.mark.parametrize(
    ("before", "after"), [("learner", "learner-1"), ("learner-1", "learner-2"), ("learner-a", "learner-a-1")]
)
def test_a_paused_learner_that_was_started_anew_is_said_to_be_paused_no_more(before: str, after: str) -> None:
    """It had ended, its name with it, and the last that was said was that admission is paused."""
    guard = ProgressGuard(LIMITS, 0.0)
    guard.record_heartbeat(Heartbeat(role="learner", worker=before, paused=True), 0.0)
    guard.record_heartbeat(Heartbeat(role="learner", worker=before, problem="blocked"), 1.0)  # by the thread that watches it
    guard.apply(WorkerFailed(worker=before, role="learner", error_class="Killed", error=""), 1.0)
    assert [line for line in guard.take_lines(100.0) if "admission" in line] == ["admission is paused by request"]
    guard.record_heartbeat(Heartbeat(role="learner", worker="learner-of-another"), 100.0)
    assert guard.take_lines(101.0) == []
    guard.record_heartbeat(Heartbeat(role="learner", worker=after), 102.0)
    assert guard.take_lines(103.0) == ["admission is resumed: a learner that begins anew is not paused"]
    guard.record_heartbeat(Heartbeat(role="learner", worker=after, paused=True), 104.0)
    assert guard.take_lines(105.0) == ["admission is paused by request"]


def test_episodes_in_which_no_call_can_be_read_are_said_once_with_what_the_policy_writes() -> None:
    guard = ProgressGuard(LIMITS, 0.0)
    turn = Turn(action=Action(episode_id="e", attempt=1, turn=0, text="I think\nso " + "x" * 1000), lane="l", sequence=1)
    note = note_unread(Conclusion(outcome="truncated", error_class="turns"), [turn, turn]).note
    for number in range(20):
        guard.apply(
            finished(number, "truncated", error_class="turns", error="", error_location="", reward=0.0, turns=2, note=note), 0.0
        )
    (line,) = guard.take_lines(0.0)
    assert line.startswith("8 of 8 episodes called no tool") and "no tool call could be read in its 2 turns" in line
    assert "the policy writes 'I think\\nso x" in line and "--model" in line and len(line) < 500


def test_a_secret_is_taken_out_of_what_the_policy_writes_before_that_is_cut() -> None:
    token = "ghp_" + "a1B2" * 9
    for length in (100, 110):
        text = "x" * length + " " + token
        turn = Turn(action=Action(episode_id="e", attempt=1, turn=0, text=text), lane="l", sequence=1)
        assert "ghp_a1" not in note_unread(Conclusion(outcome="truncated", error_class="turns"), [turn]).note


def test_episodes_whose_tokens_are_used_up_without_a_call_are_no_shortage_of_tokens() -> None:
    """In many turns, of which nothing is said but that no call could be read."""
    guard = ProgressGuard(LIMITS, 0.0)
    turn = Turn(action=Action(episode_id="e", attempt=1, turn=0, text="I think"), lane="l", sequence=1)
    note = note_unread(Conclusion(outcome="truncated", error_class="tokens"), [turn] * 9).note
    fields: dict[str, Any] = {"error_class": "tokens", "error": "", "error_location": "", "reward": 0.0, "turns": 9}
    for number in range(20):
        guard.apply(finished(number, "truncated", note=note, **fields), 0.0)
    (line,) = guard.take_lines(0.0)
    assert "called no tool" in line


@pytest.mark.parametrize(("kind", "beginning"), [("turns", NO_CALL_READ), ("tokens", "its tokens were used up")])
def test_a_note_takes_one_line_of_the_screen_whatever_it_holds(kind: str, beginning: str) -> None:
    guard = ProgressGuard(LIMITS, 0.0)
    note = f"{beginning}\nlearner: TRAINED\x1b[2J\n" + "x" * 100_000
    for number in range(20):
        fields: dict[str, Any] = {"error_class": kind, "reward": 0.0, "turns": 1, "note": note}
        guard.apply(finished(number, "truncated", error="", error_location="", **fields), 0.0)
    (line,) = guard.take_lines(0.0)
    assert "\n" not in line
    assert len(line) < 1000
