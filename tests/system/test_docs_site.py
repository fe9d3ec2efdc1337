"""The site is built without a warning and loads nothing from elsewhere; the tutorial does what it says, start to end."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(7200)]

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r'```(sh|python title="([^"]+)")\n(.*?)```', re.DOTALL)
LOADED = re.compile(
    r'<(?:script|img|iframe)[^>]+src="(https?:)?//|<link[^>]+rel="(?:stylesheet|preload|preconnect)"[^>]+href="(https?:)?//'
)


def test_the_site_is_built_strictly_and_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    if importlib.util.find_spec("material") is None:
        pytest.skip("no mkdocs-material: just docs")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert built.returncode == 0, built.stderr
    pages = list(tmp_path.rglob("*.html"))
    assert len(pages) > 80
    assert [page.name for page in pages if LOADED.search(page.read_text())] == []
    assert "(tutorial/1-first-run.html)" in (tmp_path / "llms.txt").read_text()


def run_line(line: str, folder: Path) -> None:
    """One command line, in bash, with the commands of this environment; `pytest -s` shows the seconds of each."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("FLEETBUS_", "PYTEST_"))}
    variables["PATH"] = f"{Path(sys.executable).parent}:{variables['PATH']}"
    began = time.monotonic()
    done = subprocess.run(
        ["bash", "-c", line], cwd=folder, env=variables, capture_output=True, text=True, timeout=2400, check=False
    )
    print(f"{time.monotonic() - began:6.1f} s  {line}")
    assert done.returncode == 0, f"{line}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"


def test_the_tutorial_does_what_it_says(tmp_path: Path) -> None:
    lines = 0
    for page in sorted((ROOT / "docs" / "tutorial").glob("*.md")):
        for kind, title, content in BLOCK.findall(page.read_text()):
            if kind != "sh":
                (tmp_path / title).write_text(content)
                continue
            for line in content.strip().splitlines():
                run_line(line, tmp_path)
                lines += 1
    assert lines > 20
    learned = json.loads((tmp_path / ".fleetbus" / "runs" / "library" / "summary.json").read_text())
    assert learned["success_end"] >= learned["success_start"] + 0.15


def test_a_command_of_the_tutorial_that_does_not_fail_as_it_should_is_noticed(tmp_path: Path) -> None:
    run_line("! false", tmp_path)
    with pytest.raises(AssertionError):
        run_line("! true", tmp_path)
