"""A full disk and a package that is not installed are one line each, and no traceback."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from fleetbus_workers.cli import program
from fleetbus_workers.cli.look import audit
from fleetbus_workers.cli.missing_packages import find_extra


def refuse(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(audit.command, "callback", fail)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_one_line(number: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    full = OSError(number, "No space left on device", "/data/run.fbrec")
    refuse(monkeypatch, ExceptionGroup("tasks", [full]))
    assert program.run_program(["audit"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "the disk is full" in line and "/data/run.fbrec" in line and "free space" in line


def test_a_file_beyond_the_limit_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    refuse(monkeypatch, OSError(errno.EFBIG, "File too large", "/data/run.fbrec"))
    assert program.run_program(["audit"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "/data/run.fbrec" in line and "ulimit -f" in line


def test_a_package_of_an_extra_is_named_with_its_extra(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    refuse(monkeypatch, ModuleNotFoundError("No module named 'trio'", name="trio"))
    assert program.run_program(["audit"]) == 2
    assert capsys.readouterr().err == "fleetbus: this needs the package trio: pip install 'fleetbus[simulation]'\n"


def test_the_size_of_torch_is_said_before_it_is_downloaded(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    refuse(monkeypatch, ModuleNotFoundError("No module named 'torch'", name="torch"))
    assert program.run_program(["audit"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "6 GB" in line and "download.pytorch.org/whl/cpu" in line
    readme = Path(__file__).parents[2] / "README.md"
    assert "download.pytorch.org/whl/cpu" in readme.read_text()


def test_a_module_of_nobody_is_a_crash_with_its_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    refuse(monkeypatch, ModuleNotFoundError("No module named 'my_own'", name="my_own"))
    assert program.run_program(["audit"]) == 1
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("module", "extra"),
    [
        ("torch", "torch"),
        ("PIL.Image", "vision"),
        ("prometheus_client", "metrics"),
        ("reasoning_gym", "texts"),
        ("click", None),
        ("my_own", None),
    ],
)
def test_the_smallest_extra_is_found(module: str, extra: str | None) -> None:
    assert find_extra(module) == extra
