"""Every recipe trains three steps, here with the starter policy as its model: settings, tasks and environment fit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fleetbus_workers.assembly.model import find_starter_folder
from fleetbus_workers.up.recipes import find_recipe, list_recipes

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

QUICK = (
    "--steps", "3", "--learner-groups", "2", "--learner-group-size", "2", "--evaluation-episodes", "2", "--no-monitor",
    "--episode-max-turns", "2", "--episode-max-tokens", "8", "--environment-sandbox", "limits",
)  # fmt: skip


@pytest.mark.parametrize("name", [recipe.name for recipe in list_recipes()])
def test_a_recipe_trains_three_steps(name: str, tmp_path: Path) -> None:
    for package in find_recipe(name).about.needs:
        pytest.importorskip(package)
    command = [sys.executable, "-m", "fleetbus_workers.cli", "up", "--recipe", name, "--model", str(find_starter_folder())]
    variables = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    ended = subprocess.run(
        [*command, *QUICK], cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=280, check=False
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    summary = json.loads((tmp_path / ".fleetbus" / "runs" / name / "summary.json").read_bytes())
    assert summary["finished"] and summary["optimizer_steps"] == 3 and summary["episodes_trained"] >= 8
