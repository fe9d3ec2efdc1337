"""``fleetbus runs``: what is in the folder of runs, wherever that is configured, and what may be removed from it."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from fleetbus_workers.cli.program import run_program

Said = Callable[..., str]


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Said:
    """What a command line prints, which has to end with ``code``."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str, code: int = 0) -> str:
        status = run_program(("runs", *arguments))
        shown = capsys.readouterr()
        assert status == code, shown
        return shown.out or shown.err

    return run


def make_run(folder: Path, name: str) -> Path:
    (folder / name / "nats").mkdir(parents=True)
    (folder / name / "run.json").write_text("{}")
    (folder / name / "nats" / "log").write_bytes(bytes(1000))
    return folder / name


@pytest.mark.parametrize("how", ["variable", "file", "flag", "default"])
def test_runs_are_looked_for_where_up_keeps_them(how: str, said: Said, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / (".fleetbus/runs" if how == "default" else "elsewhere")
    make_run(folder, "a")
    if how == "variable":
        monkeypatch.setenv("FLEETBUS_RUN_FOLDER", str(folder))
    if how == "file":
        (tmp_path / "fleetbus.toml").write_text(f"[run]\nfolder = {str(folder)!r}\n")
    flags = ("--run-folder", str(folder)) if how == "flag" else ()
    (listed,) = json.loads(said("list", "--json", *flags))
    assert (listed["run"], listed["running"], listed["bytes"]) == ("a", False, 1002)
    assert "removed a" in said("rm", "a", "--yes", *flags)
    assert not (folder / "a").exists()


def test_nothing_is_removed_if_one_of_the_runs_may_not_be(said: Said, tmp_path: Path) -> None:
    folder = tmp_path / ".fleetbus" / "runs"
    stopped, running = make_run(folder, "stopped"), make_run(folder, "running")
    (folder / "link").symlink_to(stopped)
    (folder / "notes").mkdir()
    with (running / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert [row["running"] for row in json.loads(said("list", "--json")) if row["run"] == "running"] == [True]
        assert "is running" in said("rm", "stopped", "running", "--yes", code=2)
    for name in ("nobody", "link", "notes", "..", "../runs"):
        assert "fleetbus: " in said("rm", "stopped", name, "--yes", code=2)
    assert stopped.is_dir() and running.is_dir() and (folder / "notes").is_dir()


def add_checkpoint(run: Path, step: int) -> None:
    (run / "checkpoints" / f"l1-{step:06d}").mkdir(parents=True)


def add_summary(run: Path, steps: int, end: float | None) -> None:
    content = {
        "run": run.name,
        "optimizer_steps": steps,
        "success_start": 0.25,
        "success_end": end,
        "finished": end is not None,
        "signal": "flat",
    }
    (run / "summary.json").write_text(json.dumps(content))


def test_a_result_that_training_went_past_is_not_shown_as_the_present_one(said: Said, tmp_path: Path) -> None:
    run = make_run(tmp_path / ".fleetbus" / "runs", "a")
    (run / "model").mkdir()
    add_summary(run, 20, 0.75)
    add_checkpoint(run, 20)
    assert "finished" in said("list") and "25% → 75%" in said("list")
    add_checkpoint(run, 30)  # by an `up` that was killed
    (row,) = json.loads(said("list", "--json"))
    assert (row["finished"], row["steps"], row["success_after"], row["signal"]) == (False, 30, None, "")
    assert "stopped" in said("list") and "75%" not in said("list")


def test_the_result_of_the_run_that_a_folder_was_copied_from_is_not_that_of_the_copy(said: Said, tmp_path: Path) -> None:
    run = make_run(tmp_path / ".fleetbus" / "runs", "a")
    add_summary(run, 20, 0.75)
    run.rename(run.with_name("b"))
    (row,) = json.loads(said("list", "--json"))
    assert (row["finished"], row["steps"], row["success_before"], row["success_after"]) == (False, None, None, None)


@pytest.mark.parametrize(
    "content",
    ['{"optimizer_steps": "three"}', '{"signal": 7}', '{"success_start": "0.5"}', '{"run": []}', "[1]", "7", '"', "\xff"],
)
def test_a_run_whose_summary_cannot_be_read_is_listed_with_what_is_known(content: str, said: Said, tmp_path: Path) -> None:
    run = make_run(tmp_path / ".fleetbus" / "runs", "a")
    make_run(tmp_path / ".fleetbus" / "runs", "b")
    add_checkpoint(run, 20)
    (run / "summary.json").write_bytes(content.encode("latin-1"))
    row, other = json.loads(said("list", "--json"))
    assert (row["run"], row["finished"], row["steps"], row["success_before"], row["signal"]) == ("a", False, 20, None, "")
    assert other["run"] == "b"
    assert "stopped" in said("list")


def test_a_file_that_changes_deep_in_a_run_changes_the_run(said: Said, tmp_path: Path) -> None:
    run = make_run(tmp_path / ".fleetbus" / "runs", "a")
    os.utime(run / "nats" / "log", (4e9, 4e9))
    (row,) = json.loads(said("list", "--json"))
    assert row["changed"] == 4e9


def test_without_a_yes_nothing_is_removed(said: Said, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(tmp_path / ".fleetbus" / "runs", "a")
    monkeypatch.setattr("click.confirm", lambda *_, **__: False)
    said("rm", "a")
    assert run.is_dir()


def test_the_files_of_workers_without_up_are_a_run(said: Said, tmp_path: Path) -> None:
    """A learner on a server leaves checkpoints and weights alone."""
    run = tmp_path / ".fleetbus" / "runs" / "a"
    add_checkpoint(run, 10)
    (row,) = json.loads(said("list", "--json"))
    assert (row["run"], row["steps"], row["running"]) == ("a", 10, False)
    assert "removed a" in said("rm", "a", "--yes")
    assert not run.exists()
