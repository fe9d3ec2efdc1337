"""Commands and flags are completed in a real bash, and completing a command imports none."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fleetbus_workers.cli.program import COMMANDS, run_program

COMPLETE = """
source completion.bash
COMP_WORDS=({words}); COMP_CWORD={index}
_fleetbus_completion fleetbus "" ""
printf '%s\\n' "${{COMPREPLY[@]}}"
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """With a `fleetbus` on the path, and the script of bash."""
    program = tmp_path / "fleetbus"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -X importtime -m fleetbus_workers.cli "$@" 2>imported\n')
    program.chmod(0o755)
    script = subprocess.run([program, "completion", "bash"], cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    (tmp_path / "completion.bash").write_text(script)
    return tmp_path


def complete(folder: Path, *words: str) -> list[str]:
    code = COMPLETE.format(words=" ".join(map(repr, words)), index=len(words) - 1)
    variables = {"PATH": f"{folder}:/usr/bin:/bin"}
    done = subprocess.run(
        ["bash", "-c", code], cwd=folder, env=variables, capture_output=True, text=True, timeout=50, check=False
    )
    return done.stdout.split()


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
def test_bash_completes_commands_and_flags(folder: Path) -> None:
    assert complete(folder, "fleetbus", "in") == ["inference", "init"]
    assert not [line for line in (folder / "imported").read_text().splitlines() if "fleetbus_workers.cli.train.up" in line]
    assert complete(folder, "fleetbus", "up", "--json-s") == ["--json-summary"]
    assert complete(folder, "fleetbus", "top", "--o") == ["--once"]


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_get_a_script(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_program(["completion", shell]) == 0
    assert "_FLEETBUS_COMPLETE" in capsys.readouterr().out
    assert "completion" in COMMANDS
