"""Progress: what the log says becomes numbers and lines."""

from __future__ import annotations

import gc
import io
import sys

import msgspec
import pytest
from rich.console import Console

from fleetbus.delivery.heartbeats import SILENT_AFTER_SECONDS
from fleetbus_schemas import Heartbeat, LineageStarted, PolicyPublished, StepTrained, WorkerFailed
from fleetbus_workers.observe.run.formatting import (
    format_count,
    format_duration,
    format_evaluation,
    format_evaluation_progress,
    format_failures,
    format_step,
    format_step_short,
    in_flight,
)
from fleetbus_workers.observe.run.progress import Progress
from fleetbus_workers.up.display import PlainDisplay, render_live_view
from fleetbus_workers.up.summary_builder import is_summarized
from tests.support.progress_messages import SECOND_NS, evaluated, finished, trained


def test_rates_are_those_of_the_last_seconds() -> None:
    progress = Progress(10)
    assert progress.rates() == (0.0, 0.0)
    for index in range(21):
        progress.apply(finished(index), index * SECOND_NS // 2)
    assert progress.rates() == (2.0, 200.0)


def test_rates_of_a_run_that_stood_still_do_not_leap_when_it_goes_on() -> None:
    progress = Progress(10)
    for index in range(3):
        progress.apply(finished(index), index)
    for index in range(5):
        progress.apply(finished(10 + index), 1000 * SECOND_NS + index)
    assert progress.rates() == (0.5, 50.0)


def test_workers_that_fell_silent_are_shown_no_more() -> None:
    progress = Progress(10)
    progress.worker_registry.record_heartbeat(Heartbeat(role="inference", worker="i"), 0.0)
    progress.worker_registry.record_heartbeat(Heartbeat(role="environment", worker="e"), SILENT_AFTER_SECONDS)
    assert [beat.worker for beat in progress.worker_registry.list_live(SILENT_AFTER_SECONDS)] == ["e", "i"]
    assert [beat.worker for beat in progress.worker_registry.list_live(SILENT_AFTER_SECONDS + 0.1)] == ["e"]


def test_a_step_line_tells_success_staleness_stages_and_what_was_not_trained() -> None:
    progress = Progress(50)
    progress.apply(LineageStarted(lineage="a", worker="w"), 0)
    progress.apply(finished(0, "env_failed"), 0)
    progress.apply(trained(3, success=0.5, reward=0.25, staleness_max=1.0, seconds_train=0.512, excluded=("stale", "stale")), 0)
    assert format_step(progress) == (
        "step 3/50 · success 0.50 · reward 0.25 · version 3 · staleness 1 · train 0.51 s"
        " · not trained so far: env failed 1, stale 2"
    )


def test_steps_of_minutes_are_told_in_whole_seconds_and_less_than_an_episode_a_second_as_a_part_of_one() -> None:
    progress = Progress(12)
    for index in range(3):
        progress.apply(finished(index), index * 4 * SECOND_NS)
    progress.apply(trained(2, seconds_train=114.2, seconds_wait=9.96), 0)
    assert format_step(progress) == "step 2/12 · version 2 · 0.25 episodes/s, 25 tokens/s · train 114 s, wait 10 s"


def test_a_step_line_copes_with_a_learner_that_measures_nothing() -> None:
    progress = Progress(50)
    progress.apply(trained(1), 0)
    assert format_step(progress) == "step 1/50 · version 1"


def test_a_step_is_told_in_80_columns_where_the_rest_is_shown_below() -> None:
    progress = Progress(1000)
    for index in range(3):
        progress.apply(finished(index), index * SECOND_NS // 2)
    progress.apply(trained(123, success=0.5, reward=0.504, staleness_max=1.0, seconds_train=0.512, excluded=("stale",)), 0)
    assert format_step_short(progress) == "step 123/1000 · success 0.50 · version 123 · staleness 1 · 2 episodes/s"
    progress.apply(trained(124, success=0.5, reward=0.25), 0)
    assert format_step_short(progress) == "step 124/1000 · success 0.50 · reward 0.25 · version 124 · 2 episodes/s"
    progress.apply(trained(125), 0)
    assert format_step_short(progress) == "step 125/1000 · version 125 · 2 episodes/s"


def test_what_a_cut_lineage_left_untrained_is_not_counted_twice() -> None:
    progress = Progress(50)
    progress.apply(LineageStarted(lineage="a", worker="w"), 0)
    for step in (1, 2, 3):
        progress.apply(trained(step, excluded=("stale",) * step), 0)
    progress.apply(LineageStarted(lineage="b", worker="w", parent="a", parent_step=1), 0)
    assert format_failures(progress) == "not trained so far: stale 1"
    progress.apply(trained(2, lineage="b", excluded=("stale", "late")), 0)
    assert format_failures(progress) == "not trained so far: late 1, stale 2"


def test_a_learner_has_groups_in_flight_and_no_slots() -> None:
    assert in_flight("environment", 12, 64) == "12/64"
    assert in_flight("learner", 32, 16) == "32 groups"
    assert in_flight("inference", 0, 0) == ""


def test_graded_outcomes_are_no_failures() -> None:
    progress = Progress(1)
    for index, outcome in enumerate(("completed", "truncated")):
        progress.apply(finished(index, outcome), 0)  # type: ignore[arg-type]
    assert format_failures(progress) == ""


def test_evaluations_are_told_with_what_has_no_grade() -> None:
    line = format_evaluation(evaluated("end_greedy", 0.875, temperature=0.0))
    assert (
        line
        == "held out, end greedy: success 87.5% of 8 episodes, mean reward 0.875 (greedy, 95%: 52.9-97.8%, 2 without a grade)"
    )


def test_tasks_that_were_played_again_and_again_are_said_and_make_the_interval_wide() -> None:
    many = msgspec.structs.replace(evaluated("end", 0.945), episodes=256, graded=256)
    assert "of 256 episodes, mean" in format_evaluation(many) and "91.0-96.7%" in format_evaluation(many)
    few = msgspec.structs.replace(many, tasks=6)
    assert "of 256 episodes of 6 tasks, mean" in format_evaluation(few) and "95%: 54.7-99.6%" in format_evaluation(few)


def test_plain_lines_come_for_steps_evaluations_and_failures_only() -> None:
    lines: list[str] = []
    progress = Progress(2)
    display = PlainDisplay(progress, lines.append)
    messages = [
        finished(0),
        trained(1),
        evaluated("start", 0.5),
        PolicyPublished(policy="p", version=1, lineage="a", step=1, uri="", manifest=(), size_bytes=0),
        WorkerFailed(role="inference", worker="i", error_class="EngineFailed", error="no memory"),
    ]
    for message in messages:
        progress.apply(message, 0)
        display.show_message(message)
    assert [line.split(" ")[0] for line in lines] == ["step", "held", "i"]
    assert lines[-1] == "i failed: EngineFailed: no memory"


@pytest.mark.parametrize("width", [50, 80, 160])
def test_the_live_picture_fits_the_terminal(width: int) -> None:
    progress = Progress(50)
    progress.apply(trained(25, success=0.5, seconds_train=1.0, excluded=("stale",)), 0)
    beats = [Heartbeat(role="environment", worker=f"environment-{index}", slots=64, in_flight=3) for index in range(3)]
    console = Console(file=io.StringIO(), width=width, force_terminal=False)
    console.print(render_live_view(progress, beats, 75.0))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "step 25/50" in text and "1 min 15 s" in " ".join(text.split()) and "environment-2" in text and "3/64" in text
    assert max(len(line) for line in text.splitlines()) <= width


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0 s"), (59.6, "1 min 0 s"), (101, "1 min 41 s"), (3600, "1 h"), (7320, "2 h 2 min")]
)
def test_durations_read_well(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


def test_counts_are_rounded_to_what_fits() -> None:
    assert [format_count(count) for count in (0.0, 999, 6512, 1_250_000, 3e9)] == ["0", "999", "6.5k", "1.2M", "3.0G"]


@pytest.mark.integration
def test_a_book_of_many_steps_does_not_remember_which_episodes_they_trained() -> None:
    book = Progress(1, keeps=is_summarized)

    def book_steps(first: int, count: int) -> int:
        for step in range(first, first + count):
            episodes = tuple(f"g{step:06d}-{index}" for index in range(64))
            metrics = {f"metric_{index}": float(step) for index in range(30)} | {"reward": 1.0}
            book.apply(StepTrained(lineage="l1", step=step, version=step, episodes=episodes, metrics=metrics), 0)
        gc.collect()
        return sys.getallocatedblocks()

    before = book_steps(1, 100)
    grown = book_steps(101, 500) - before
    assert grown / 500 < 16, "memory blocks per step; the ids alone would be 64"


def test_how_far_an_evaluation_is_and_how_long_it_takes_is_said() -> None:
    progress = Progress(10, evaluation_episodes=32)
    assert format_evaluation_progress(progress) == ""
    for index in range(12):
        episode = msgspec.structs.replace(finished(index), split="eval")
        progress.apply(episode, index * SECOND_NS // 2)
        if index == 2:
            assert format_evaluation_progress(progress) == "held out: 3 of 32 episodes", "three tell nothing of their rate"
    assert format_evaluation_progress(progress) == "held out: 12 of 32 episodes, about 10 s left"
    progress.apply(evaluated("start", 0.5), 9 * SECOND_NS)
    assert format_evaluation_progress(progress) == ""
