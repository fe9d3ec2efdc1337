"""The end of a run: a summary, its report and a picture, from what the log says."""

from __future__ import annotations

import math
import re
from pathlib import Path

import msgspec
import pytest

from fleetbus.config.run_folder import RunFolder
from fleetbus_schemas import Exclusion, LineageStarted, TrainingFinished
from fleetbus_workers.observe.run.formatting import format_evaluation
from fleetbus_workers.observe.run.progress import Progress
from fleetbus_workers.up.reward_chart import draw_reward_chart, smooth
from fleetbus_workers.up.summary_builder import Summary, build_summary, is_summarized
from fleetbus_workers.up.summary_report import format_report
from tests.support.progress_messages import evaluated, finished, trained


def summed(book: Progress) -> Summary:
    return build_summary(book, run="r", seed=3, wall_seconds=12.3456)


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
