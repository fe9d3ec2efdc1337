"""That nothing is learned any more is told by `up` when it begins, at the end, and by the learner in its log: once each."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import structlog

from fleetbus.config.run_folder import RunFolder
from fleetbus.core.training.task_losses import TaskLosses
from fleetbus_schemas import LineageStarted, StepTrained
from fleetbus_workers.cli.program import run_program
from fleetbus_workers.learner.batch_metrics import SignalLog
from fleetbus_workers.observe.run.progress import Progress
from fleetbus_workers.up.display import PlainDisplay
from fleetbus_workers.up.summary_builder import Summary, build_summary
from fleetbus_workers.up.summary_report import format_report, load_summary, write_summary

SECOND = 1_000_000_000


def step(number: int, success: float) -> StepTrained:
    """Sixteen groups of eight; those without any success have no signal, as have those without any failure."""
    flat = success in (0.0, 1.0)
    metrics = {"success": success, "reward": success, "groups_without_signal": 16.0 if flat else 4.0}
    metrics["advantage_size_mean"] = 0.0 if flat else 0.5
    episodes = tuple(f"{number}-{index}" for index in range(128))
    return StepTrained(lineage="a", step=number, version=number, episodes=episodes, metrics=metrics)


COLLAPSE = [*[0.8] * 5, *[0.0] * 6, *[0.3] * 3, *[0.0] * 6]


def test_up_says_in_a_line_of_its_own_that_a_run_collapsed_and_again_only_if_it_came_back_meanwhile() -> None:
    progress, lines = Progress(100), list[str]()
    display = PlainDisplay(progress, lines.append)
    progress.apply(LineageStarted(lineage="a", worker="l"), 0)
    for number, success in enumerate(COLLAPSE, 1):
        message = step(number, success)
        progress.apply(message, number * SECOND)
        display.show_message(message)
    told = [line for line in lines if not line.startswith("step ")]
    assert all(line.startswith("success fell from 0.80 to 0.00 within") and "start again" in line for line in told)
    assert ["no signal" in line for line in told] == [False, True, False, True], "it fell, and then nothing was left; twice"


def test_the_learner_says_it_in_its_log_and_that_it_is_over() -> None:
    said = SignalLog()
    with structlog.testing.capture_logs() as logs:
        for number, success in enumerate(COLLAPSE[:14], 1):
            said.record_step(step(number, success), number * SECOND, TaskLosses())
    assert [each["log_level"] for each in logs] == ["warning", "warning", "info"]
    assert "no signal since step 6" in logs[1]["event"] and "learner.max_grad_norm" in logs[1]["advice"]
    assert logs[2]["event"] == "learning signal has returned"


def test_a_run_that_solved_its_tasks_is_no_warning() -> None:
    said = SignalLog()
    with structlog.testing.capture_logs() as logs:
        for number in range(1, 20):
            said.record_step(step(number, 1.0), number * SECOND, TaskLosses())
    assert [(each["log_level"], each["event"][:26]) for each in logs] == [("info", "no more to learn since ste")]


def summary(signal: str) -> Summary:
    book = Progress(1)
    book.apply(step(1, 0.5), 0)
    return msgspec.structs.replace(build_summary(book, run="r", seed=1, wall_seconds=1.0), signal=signal)


def test_the_report_at_the_end_says_it_in_80_columns_and_the_summary_keeps_it(tmp_path: Path) -> None:
    reason = "no signal since step 11: the last 96 groups had equal rewards each (success 0.00, reward 0.00)"
    folder = RunFolder(tmp_path)
    lines = format_report(summary(reason), RunFolder(Path(".fleetbus/runs/r")), str)
    assert reason in " ".join(lines) and all(len(line) <= 80 for line in lines)
    assert "no signal" not in " ".join(format_report(summary(""), folder, str))
    write_summary(summary(reason), folder.summary)
    loaded = load_summary(folder)
    assert loaded is not None and loaded.signal == reason


def test_a_summary_of_an_earlier_release_says_nothing_of_it(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    older = msgspec.to_builtins(summary("x"))
    del older["signal"]
    folder.summary.write_bytes(msgspec.json.encode(older))
    loaded = load_summary(folder)
    assert loaded is not None and loaded.signal == ""


def test_the_list_of_runs_says_which_of_them_learned_nothing_at_the_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, signal in (("good", ""), ("lost", "no signal since step 11"), ("older", None)):
        folder = RunFolder(tmp_path / name)
        folder.path.mkdir()
        (folder.path / "run.json").write_text("{}")
        write_summary(msgspec.structs.replace(summary(signal or ""), run=name), folder.summary)
        if signal is None:
            older = msgspec.json.decode(folder.summary.read_bytes())
            del older["signal"]
            folder.summary.write_bytes(msgspec.json.encode(older))
    assert run_program(["runs", "list", "--run-folder", str(tmp_path), "--json"]) == 0
    assert [row["signal"] for row in msgspec.json.decode(capsys.readouterr().out)] == ["", "no signal since step 11", ""]
    assert run_program(["runs", "list", "--run-folder", str(tmp_path)]) == 0
    assert capsys.readouterr().out.splitlines()[4:] == ["lost: no signal since step 11"]
