"""Projects that `docs/environments.md` shows are checked and trained as the page says, to the step that it promises."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "environments.md"
FILE = re.compile(r'```(?:python|json) title="([^"]+)"\n(.*?)```', re.DOTALL)
COMMANDS = re.compile(r"```console\n(.*?)```", re.DOTALL)

pytestmark = [pytest.mark.timeout(500), pytest.mark.integration]


def write_project(section: str, folder: Path) -> list[str]:
    """Write the files that the section shows; its commands."""
    text = PAGE.read_text().partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    for name, content in FILE.findall(text):
        (folder / name).write_text(content)
    lines = COMMANDS.findall(text)[0].replace("\\\n", " ").splitlines()
    return [line.removeprefix("$ ") for line in lines]


def run_line(line: str, folder: Path) -> str:
    variables = {name: value for name, value in os.environ.items() if not name.startswith("FLEETBUS_")}
    variables["PATH"] = f"{Path(sys.executable).parent}:{variables['PATH']}"
    done = subprocess.run(["bash", "-c", line], cwd=folder, env=variables, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, f"{line}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


@pytest.mark.parametrize("section", ["Gymnasium", "MCP servers"])
def test_the_project_of_a_section_passes_the_check(section: str, tmp_path: Path) -> None:
    check, _ = write_project(section, tmp_path)
    assert "ok  task a" in run_line(check, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("section, run", [("Gymnasium", "pond"), ("MCP servers", "numbers")])
def test_the_project_of_a_section_is_trained(section: str, run: str, tmp_path: Path) -> None:
    _, up = write_project(section, tmp_path)
    run_line(f"{up} --no-monitor", tmp_path)
    summary = json.loads((tmp_path / ".fleetbus" / "runs" / run / "summary.json").read_text())
    assert (summary["finished"], summary["episodes_trained"]) == (True, 8)
