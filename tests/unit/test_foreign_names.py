"""Names of tasks and environments of other packages: a file is meant as one, however its path is written."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from fleetbus.errors import UserError
from fleetbus_workers.environment.adapters.foreign.factory import build_command


@pytest.mark.parametrize("name", ["sums.py@sums", "./sums.py@sums", "sums.py"])
def test_a_file_of_the_working_folder_is_named_with_and_without_its_folder(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sums.py").touch()
    assert build_command(f"inspect:{name}", sys.executable)[-1] == str(tmp_path / name.removeprefix("./"))


def test_a_file_that_is_not_there_is_refused_by_its_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=f"there is no {tmp_path}/sums.py"):
        build_command("inspect:sums.py@sums", sys.executable)


def test_a_package_stays_a_name() -> None:
    assert build_command("inspect:inspect_evals/gsm8k", sys.executable)[-1] == "inspect_evals/gsm8k"


@pytest.mark.parametrize("name", ["my_env.py", "./my_env.py", "nowhere/my_env.py", "my_env.py@v1", "./.py"])
def test_a_file_as_an_environment_of_verifiers_is_refused_by_what_to_write_instead(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its package would look for a module of that name, find none, and end each episode so."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_env.py").touch()
    with pytest.raises(UserError, match=r"verifiers imports environments by name, not from a file: .* write verifiers:\w+"):
        build_command(f"verifiers:{name}", sys.executable)
