"""Progress and book: what the log says becomes numbers, lines, a summary and a picture."""

from __future__ import annotations

import gc
import io
import math
import re
import sys
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from fleetbus.config.run_folder import RunFolder
from fleetbus.delivery.heartbeats import SILENT_AFTER_SECONDS
from fleetbus_schemas import (
    EpisodeFinished,
    EvaluationFinished,
    Exclusion,
    Heartbeat,
    LineageStarted,
    Outcome,
    PolicyPublished,
    StepTrained,
    TrainingFinished,
    WorkerFailed,
)
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
from fleetbus_workers.up.reward_chart import draw_reward_chart, smooth
from fleetbus_workers.up.summary_builder import Summary, build_summary, is_summarized
from fleetbus_workers.up.summary_report import format_report

SECOND_NS = 1_000_000_000


def trained(step: int, *, lineage: str = "a", excluded: tuple[str, ...] = (), **metrics: float) -> StepTrained:
    exclusions = tuple(Exclusion(episode_id=f"x{step}-{index}", reason=reason) for index, reason in enumerate(excluded))
    ids = (f"{lineage}{step}-0", f"{lineage}{step}-1")
    return StepTrained(lineage=lineage, step=step, version=step, episodes=ids, excluded=exclusions, metrics=metrics)


def finished(episode: int, outcome: Outcome = "completed", **fields: float) -> EpisodeFinished:
    return EpisodeFinished(
        episode_id=f"e{episode}", group_id="g", attempt=1, outcome=outcome, worker="w", tokens=100, timings=fields
    )


def evaluated(name: str, success: float, step: int = 0, lineage: str = "a", temperature: float = 1.0) -> EvaluationFinished:
    return EvaluationFinished(
        lineage=lineage, step=step, version=step, name=name, episodes=10, graded=8, success=success, mean_reward=success,
        temperature=temperature,
    )  # fmt: skip


def summed(book: Progress) -> Summary:
    return build_summary(book, run="r", seed=3, wall_seconds=12.3456)


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


def test_greedy_and_sampled_success_are_told_before_and_after_with_intervals() -> None:
    book = Progress(1, keeps=is_summarized)
    book.apply(LineageStarted(lineage="a", worker="w"), 0)
    for name, success in {"start": 0.37, "start_greedy": 0.9, "end": 0.9, "end_greedy": 1.0}.items():
        book.apply(msgspec.structs.replace(evaluated(name, success), graded=10, tasks=10), 0)
    lines = format_report(summed(book), RunFolder(Path("r")), str)
    assert lines[0] == "success on held-out tasks 37.0% → 90.0% sampled, 90.0% → 100.0% greedy"
    told = " ".join(lines[2:5])
    assert "end 59.6-98.2%, greedy start 59.6-98.2%, greedy end 72.2-100.0%, of 10 tasks" in told
    assert all(len(line) <= 80 for line in lines)


def test_a_run_that_learned_nothing_is_not_just_finished() -> None:
    book = Progress(1, keeps=is_summarized)
    book.apply(LineageStarted(lineage="a", worker="w"), 0)
    book.apply(trained(1), 0)
    book.apply(TrainingFinished(lineage="a", step=1, version=1), 0)
    lost = msgspec.structs.replace(summed(book), signal="64 groups without an advantage", signal_kind="no_signal")
    for summary in (lost, msgspec.structs.replace(lost, signal_kind="fell")):
        assert format_report(summary, RunFolder(Path("r")), str)[0] == "finished without a learning signal"
    solved = msgspec.structs.replace(lost, signal_kind="solved")
    assert format_report(solved, RunFolder(Path("r")), str)[0] == "finished"


def test_success_is_reported_of_graded_episodes_and_of_all(tmp_path: Path) -> None:
    counted = msgspec.structs.replace(evaluated("end", 0.875, step=1), successes=7)
    assert format_evaluation(counted).endswith(", 2 without a grade: success 70.0% of all 10)")
    book = Progress(1, keeps=is_summarized)
    for message in (LineageStarted(lineage="a", worker="w"), trained(1), counted):
        book.apply(message, 0)
    summary = summed(book)
    assert summary.success_of_all == {"end": 0.7}
    report = format_report(summary, RunFolder(tmp_path), str)
    assert "at the end 70.0% of all episodes, those without a grade included" in report


def test_an_evaluation_without_a_grade_is_no_measurement() -> None:
    empty = msgspec.structs.replace(evaluated("start", 0.0), episodes=10, graded=0)
    assert format_evaluation(empty) == "held out, start: not measured, for none of 10 episodes has a grade (sampled)"
    progress = Progress(1, keeps=is_summarized)
    progress.apply(LineageStarted(lineage="a", worker="w"), 0)
    progress.apply(empty, 0)
    summary = build_summary(progress, run="r", seed=1, wall_seconds=0.0)
    assert summary.success_start is None and summary.reward_start is None


def test_the_mean_reward_stands_beside_the_success_in_the_report() -> None:
    progress = Progress(1, keeps=is_summarized)
    progress.apply(LineageStarted(lineage="a", worker="w"), 0)
    for name, reward in (("start", 0.41), ("end", 0.62)):
        progress.apply(msgspec.structs.replace(evaluated(name, 0.0), mean_reward=reward), 0)
    report = format_report(build_summary(progress, run="r", seed=1, wall_seconds=0.0), RunFolder(Path("r")), str)
    assert report[0] == "success on held-out tasks 0.0% → 0.0% sampled; mean reward 0.410 → 0.620"


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


def test_the_summary_counts_only_the_lineage_that_survived() -> None:
    book = Progress(1, keeps=is_summarized)
    for message in (
        LineageStarted(lineage="a", worker="w1"),
        evaluated("start", 0.25),
        trained(1, reward=0.1, excluded=("stale",)),
        trained(2, reward=0.2),
        trained(3, reward=0.9, excluded=("stale", "lost")),
        LineageStarted(lineage="b", worker="w2", parent="a", parent_step=2),
        trained(3, lineage="b", reward=0.3, excluded=("timeout",)),
        evaluated("end", 0.75, step=3, lineage="b"),
        TrainingFinished(lineage="b", step=3, version=3, excluded=(Exclusion(episode_id="x", reason="training_finished"),)),
    ):
        book.apply(message, 0)
    summary = summed(book)
    assert summary.steps == [1, 2, 3] and summary.reward_by_step == [0.1, 0.2, 0.3]
    assert summary.episodes_trained == 6
    assert summary.episodes_excluded == {"stale": 1, "timeout": 1, "training_finished": 1}
    assert (summary.success_start, summary.success_end, summary.success_end_greedy) == (0.25, 0.75, None)
    assert summary.finished and summary.seed == 3 and summary.wall_seconds == 12.346


def test_a_learner_that_starts_over_voids_everything_but_the_evaluation_of_the_start() -> None:
    book = Progress(1, keeps=is_summarized)
    for message in (
        LineageStarted(lineage="a", worker="w1"),
        evaluated("start", 0.25),
        trained(1),
        LineageStarted(lineage="b", worker="w2", parent="a", parent_step=0),
    ):
        book.apply(message, 0)
    assert summed(book).optimizer_steps == 0 and summed(book).success_start == 0.25


def test_training_further_is_unfinished_until_it_ends_again() -> None:
    book = Progress(1, keeps=is_summarized)
    for message in (
        LineageStarted(lineage="a", worker="w1"),
        trained(1),
        evaluated("end", 0.5, step=1),
        TrainingFinished(lineage="a", step=1, version=1),
        LineageStarted(lineage="b", worker="w2", parent="a", parent_step=1),
    ):
        book.apply(message, 0)
    assert not summed(book).finished and summed(book).optimizer_steps == 1 and summed(book).success_end == 0.5
    book.apply(trained(2, lineage="b"), 0)
    book.apply(evaluated("end", 0.75, step=2, lineage="b"), 0)
    book.apply(TrainingFinished(lineage="b", step=2, version=2), 0)
    assert summed(book).finished and summed(book).optimizer_steps == 2 and summed(book).success_end == 0.75


def test_numbers_that_were_not_measured_are_left_out_of_the_maxima() -> None:
    book = Progress(1, keeps=is_summarized)
    book.apply(LineageStarted(lineage="a", worker="w"), 0)
    book.apply(trained(1, logprob_difference_max=math.nan, staleness_max=2.0, reward=math.nan, seconds_wait=0.5), 0)
    book.apply(trained(2, logprob_difference_max=1e-5, logprob_difference_mean=1e-6, reward=0.5, seconds_wait=0.25), 0)
    book.apply(finished(0, open=0.1, action=1.0), 0)
    book.apply(finished(1, "timeout", action=2.0), 0)
    summary = summed(book)
    assert (summary.max_logprob_difference, summary.mean_logprob_difference) == (1e-5, 1e-6)
    assert summary.max_staleness_seen == 2
    assert summary.reward_by_step == [None, 0.5]
    assert summary.seconds_by_stage == {"wait": 0.75, "episode_open": 0.1, "episode_action": 3.0}
    assert summary.episodes_by_outcome == {"completed": 1, "timeout": 1}


def test_the_end_of_a_run_is_told_in_80_columns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    book = Progress(1, keeps=is_summarized)
    book.apply(LineageStarted(lineage="a", worker="w"), 0)
    end = msgspec.structs.replace(evaluated("end", 0.934, step=80), graded=256, episodes=256)
    for message in (evaluated("start", 0.344), trained(80, excluded=("stale",) * 232), end):
        book.apply(message, 0)
    book.apply(evaluated("end_greedy", 1.0, step=80, temperature=0.0), 0)
    book.apply(TrainingFinished(lineage="a", step=80, version=80), 0)
    lines = format_report(summed(book), RunFolder(Path(".fleetbus/runs/r")), str)
    assert "34.4% → 93.4% sampled, 100.0% greedy" in lines[0] and "excluded: stale 232 · 12 s" in lines[1]
    assert "trains it further" in lines[-2] and "starts another" in lines[-1]
    assert all(len(line) <= 80 for line in lines)
    for line in format_report(summed(book), RunFolder(tmp_path / "mine" / "r"), str)[-2:]:
        assert "--run-folder mine" in line, "what goes on must find the run again"


def test_an_empty_log_makes_an_empty_summary_and_no_picture(tmp_path: Path) -> None:
    summary = summed(Progress(1, keeps=is_summarized))
    assert summary.max_logprob_difference is summary.mean_logprob_difference is None and not summary.finished
    draw_reward_chart(summary, tmp_path / "reward.png")
    assert not (tmp_path / "reward.png").exists()


def test_smoothing_keeps_length_ends_and_mean() -> None:
    assert smooth([1.0, 1.0, 1.0]) == [1.0, 1.0, 1.0]
    assert smooth([0.0, 5.0, 0.0, 0.0, 0.0, 0.0]) == pytest.approx([5 / 3, 5 / 4, 1.0, 1.0, 0.0, 0.0])


def test_the_picture_is_a_png_of_a_readable_size(tmp_path: Path) -> None:
    book = Progress(1, keeps=is_summarized)
    started = LineageStarted(lineage="a", worker="w")
    for message in (started, evaluated("start", 0.25), *(trained(step, reward=step / 20) for step in range(1, 21))):
        book.apply(message, 0)
    file = tmp_path / "reward.png"
    draw_reward_chart(summed(book), file)
    header = file.read_bytes()[:24]
    assert header.startswith(b"\x89PNG")
    assert int.from_bytes(header[16:20], "big") >= 800
    assert not re.search("part", " ".join(path.name for path in tmp_path.iterdir()))


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
