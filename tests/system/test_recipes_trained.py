"""Every recipe trains three steps, here with the starter policy as its model: settings, tasks and environment fit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fleetbus.config.load import load_configuration
from fleetbus.tasks.files import load_dataset
from fleetbus_workers.assembly.environments import open_environments
from fleetbus_workers.assembly.model import find_starter_folder
from fleetbus_workers.starter.environment_starter import play_guesses
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


@pytest.mark.parametrize("name", [recipe.name for recipe in list_recipes() if recipe.about.starter])
async def test_random_play_is_rewarded_at_times_where_a_starter_is_built_from_it(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for package in find_recipe(name).about.needs:
        pytest.importorskip(package)
    configuration = load_configuration(recipe=find_recipe(name).build_tables()).configuration
    tasks = load_dataset(configuration.run.tasks)
    async with open_environments(configuration, specs=configuration.run.environment) as factory:
        played = await play_guesses(factory, tasks, configuration, episodes=1000, seed=0)
    assert len({reward for _, reward in played}) > 1, "`fleetbus up` would refuse this recipe"
