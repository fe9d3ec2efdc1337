"""Folders that cannot be used: one line that names the path, exit code 2, and no traceback."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fleetbus.errors import UserError
from fleetbus.files import create_folder
from fleetbus_workers.cli import program
from fleetbus_workers.cli.look import audit
from fleetbus_workers.up.lock import is_held


@pytest.mark.parametrize("error", [PermissionError, NotADirectoryError, IsADirectoryError, FileExistsError])
def test_a_path_that_cannot_be_used_is_one_line(
    error: type[OSError], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    numbers = {PermissionError: 13, NotADirectoryError: 20, IsADirectoryError: 21, FileExistsError: 17}

    def fail(*_: object, **__: object) -> None:
        raise ExceptionGroup("tasks", [error(numbers[error], os.strerror(numbers[error]), "/data/run\nlock")])

    monkeypatch.setattr(audit.command, "callback", fail)
    assert program.run_program(["audit"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "/data/run" in line and "choose another path" in line


@pytest.mark.parametrize("folder", ["/" + "a" * 300, "/tmp/" + "a/" * 2500])
def test_a_run_folder_with_too_long_a_name_is_one_line(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    for command in (["audit"], ["up"], ["top", "--once"], ["runs", "list"]):
        assert program.run_program([*command, "--run-folder", folder]) == 2, command
        (line,) = capsys.readouterr().err.splitlines()
        assert "too long" in line


def test_a_lock_that_is_a_folder_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "default" / "lock").mkdir(parents=True)
    assert program.run_program(["up", "--no-check", "--run-folder", str(tmp_path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert str(tmp_path / "default" / "lock") in line


def test_a_working_folder_that_was_removed_is_named(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    command = 'cd "$1" && rmdir "$1" && exec "$2" -m fleetbus runs list'
    ended = subprocess.run(["sh", "-c", command, "_", gone, sys.executable], capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert ended.stderr == "fleetbus: the folder that this was started in was removed: change to another one\n"


def test_a_file_in_the_place_of_a_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "weights").write_text("")
    with pytest.raises(UserError, match=r"weights cannot be used as a folder"):
        create_folder(tmp_path / "weights")
    with pytest.raises(UserError, match=r"below cannot be used as a folder"):
        create_folder(tmp_path / "weights" / "below")
    create_folder(tmp_path / "a" / "b")
    create_folder(tmp_path / "a" / "b")


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.ESTALE, errno.EIO])
def test_a_folder_that_cannot_be_made_for_now_is_no_bad_input(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Status 2 fails a worker that never restarted, for good; a disk that was full or away comes back."""

    def fail(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number), str(tmp_path))

    monkeypatch.setattr(Path, "mkdir", fail)
    with pytest.raises(OSError) as refused:
        create_folder(tmp_path)
    assert refused.value.errno == number


def test_a_crash_is_shown_whatever_became_of_the_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr(audit.command, "callback", fail)
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert program.run_program(["audit"]) == 1
    assert "RuntimeError: broken" in capsys.readouterr().err


@pytest.fixture
def read_only(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A folder with the run ``r``, as if it were on a mount that nobody can write."""
    (tmp_path / "r" / "nats").mkdir(parents=True)
    (tmp_path / "r" / "lock").write_text("1")
    access, opens = os.access, Path.open

    def open_path(path: Path, mode: str = "r", *more: Any, **options: Any) -> Any:
        if path.is_relative_to(tmp_path) and set(mode) & set("wax+"):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
        return opens(path, mode, *more, **options)

    monkeypatch.setattr(Path, "open", open_path)
    monkeypatch.setattr(os, "access", lambda path, mode: not mode & os.W_OK and access(path, mode))
    return tmp_path


def test_a_run_on_a_read_only_mount_is_listed(read_only: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert program.run_program(["runs", "list", "--json", "--run-folder", str(read_only)]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert (row["run"], row["running"]) == ("r", False)
    with (read_only / "r" / "lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert is_held(read_only / "r" / "lock")


def test_the_log_of_a_run_on_a_read_only_mount_is_refused_in_one_line(
    read_only: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert program.run_program(["audit", "r", "--run-folder", str(read_only)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"the log in {read_only / 'r'} cannot be served (Read-only file system): copy the run's folder" in line


def test_an_archive_is_read_alone_where_the_log_is_on_a_read_only_mount(
    read_only: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (read_only / "archive").mkdir()
    options = ["--run-folder", str(read_only), "--archive", str(read_only / "archive")]
    for command in ("audit", "episodes"):
        assert program.run_program([command, "r", *options]) == 2
        assert "contains no archive" in capsys.readouterr().err
