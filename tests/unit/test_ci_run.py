"""Continuous integration (`.ci/run`): a test that fails once and passes alone is named and enough, a fault is not
(docs/decisions/0238-once-more-and-said.md)."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FAILS_ONCE = """
import pathlib, pytest

@pytest.mark.parametrize("number", range({count}))
def test_that_fails(number):
    seen = pathlib.Path(f"seen{{number}}")
    assert seen.exists() and not {always}, seen.touch()

def test_that_passes():
    pass
"""


def write_project(folder: Path, *, count: int, always: bool) -> None:
    """A project of one test file, whose checks all pass."""
    (folder / "test_one.py").write_text(FAILS_ONCE.format(count=count, always=always))
    (folder / "pytest.ini").write_text("[pytest]\naddopts = -p no:randomly\nmarkers =\n  integration\n  slow\n  docker\n")
    commands = {
        ".ci/install": '[[ ${1:-} == --print ]] && echo ".venv/bin/pytest -q test_one.py"; true',
        ".venv/bin/pytest": f'exec {sys.executable} -m pytest "$@"',
        **{f".venv/bin/{name}": "true" for name in ("ruff", "lint-imports", "codespell", "mypy", "python")},
    }
    for name, script in commands.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"#!/usr/bin/env bash\n{script}\n")
        file.chmod(0o755)
    shutil.copy(ROOT / ".ci/run", folder / ".ci/run")


ENDS_IN_THE_MIDDLE = """
def test_that_ends_the_run():
    pytest.exit("in the middle")

def test_that_is_never_run():
    assert False
"""


@pytest.mark.integration
def test_tests_that_were_not_all_run_are_not_run_once_more(tmp_path: Path) -> None:
    write_project(tmp_path, count=1, always=False)
    (tmp_path / "test_one.py").write_text(FAILS_ONCE.format(count=1, always=False) + ENDS_IN_THE_MIDDLE)
    ended = subprocess.run(["bash", ".ci/run"], cwd=tmp_path, capture_output=True, text=True, timeout=50, check=False)
    assert ended.returncode == 1 and "failed: tests\n" in ended.stdout, ended.stdout[-3000:]


@pytest.mark.integration
@pytest.mark.parametrize(("count", "always", "status"), [(2, False, 0), (2, True, 1), (4, False, 1)])
def test_at_most_three_tests_are_run_once_more_and_named(count: int, always: bool, status: int, tmp_path: Path) -> None:
    write_project(tmp_path, count=count, always=always)
    # The integration tests of such a project are none, which pytest ends with status 5.
    script = (tmp_path / ".ci/run").read_text()
    (tmp_path / ".ci/run").write_text(script.replace('-m "integration and not slow and not docker"', "test_one.py -k passes"))
    ended = subprocess.run(["bash", ".ci/run"], cwd=tmp_path, capture_output=True, text=True, timeout=50, check=False)
    assert ended.returncode == status, ended.stdout[-3000:]
    is_named = "failed once, passed alone: " in ended.stdout
    assert is_named is (status == 0)
    assert ("failed: tests" in ended.stdout) is (status == 1)
    if is_named:
        assert ended.stdout.count("test_that_fails[") >= count
