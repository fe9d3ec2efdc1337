"""Recipes: each one's settings and tasks load, relative to its folder; the flags of a person win over it."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from fleetbus.config.load import load_configuration
from fleetbus.errors import UserError
from fleetbus.tasks.files import check_dataset
from fleetbus_schemas import Task
from fleetbus_workers.environment.specs import find_adapter
from fleetbus_workers.learner.curriculum import load_split
from fleetbus_workers.up import recipes
from fleetbus_workers.up.recipes import find_recipe, format_recipes, list_recipes

NAMES = ["arithmetic", "calculator", "countdown", "default", "frozen-lake", "own-tools", "search", "sums"]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_the_recipes_that_ship_are_listed_and_say_what_was_measured() -> None:
    assert [recipe.name for recipe in list_recipes()] == NAMES
    for recipe, line in zip(list_recipes(), format_recipes(), strict=True):
        assert line.startswith(recipe.name) and recipe.about.title in line
        assert (recipe.folder / "README.md").is_file()
        expected = json.loads((recipe.folder / recipes.CURVE).read_bytes())
        assert bool(recipe.about.measured) == expected["measured"], "what a recipe claims stands in its curve"


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_has_settings_and_tasks_that_load(name: str) -> None:
    recipe = find_recipe(name)
    for package in recipe.about.needs:
        pytest.importorskip(package)
    configuration = load_configuration(recipe=recipe.build_tables()).configuration
    assert configuration.run.name == name
    find_adapter(configuration.run.environment)
    if configuration.run.tasks:
        tasks, problems = check_dataset(configuration.run.tasks)
        assert len(tasks) >= 400 and not problems
        assert len({task.key for task in tasks}) == len(tasks)


def test_tasks_are_the_same_every_time_and_a_broken_file_is_written_anew() -> None:
    file = recipes.write_tasks(find_recipe("sums"))
    content = file.read_bytes()
    file.write_bytes(b"[]")
    assert recipes.write_tasks(find_recipe("sums")) == file and file.read_bytes() == content


def test_a_pair_of_numbers_that_sums_hold_out_is_trained_in_neither_order() -> None:
    def read_pairs(tasks: Sequence[Task]) -> set[tuple[str, ...]]:
        return {tuple(sorted(re.split(r"(\D)", task.key))) for task in tasks}

    train, held_out = load_split(str(recipes.write_tasks(find_recipe("sums"))), 0.1)
    assert len(held_out) == 30 and not read_pairs(train) & read_pairs(held_out)
    assert len(train) > 1.9 * len(read_pairs(train)), "nearly all are trained in both"


def test_a_folder_of_ones_own_is_a_recipe_and_its_place_is_filled_in(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "recipe.toml").write_text(
        '[recipe]\ntitle = "T"\nmodel = "M"\n[run]\nenvironment = "{recipe}/own.py:Own"\n[learner]\nsteps = 7\n'
    )
    tables = find_recipe(str(tmp_path / "mine")).build_tables()
    assert tables["run"] == {"name": "mine", "environment": f"{tmp_path / 'mine'}/own.py:Own"}


def test_flags_and_an_earlier_start_win_over_a_recipe_and_its_settings_count_as_given() -> None:
    tables = {"run": {"name": "mine"}, "learner": {"steps": 7, "groups": 3}}
    loaded = load_configuration(recipe=tables, flags={"learner.steps": 9})
    assert (loaded.configuration.learner.steps, loaded.configuration.learner.groups) == (9, 3)
    assert loaded.given["learner.groups"] == "the recipe: learner.groups"
    again = load_configuration(recipe=tables, earlier=lambda run: {"learner": {"steps": 20}} if run.name == "mine" else None)
    assert again.configuration.learner.steps == 20


def test_mistakes_are_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="no recipe 'sum': there are arithmetic, calculator"):
        find_recipe("sum")
    (tmp_path / "recipe.toml").write_text('[recipe]\ntitle = "T"\nkind = "M"\n')
    with pytest.raises(UserError, match="kind"):
        find_recipe(str(tmp_path))
    (tmp_path / "recipe.toml").write_text('[recipe]\ntitle = "T"\nmodel = "M"\nneeds = { no_such = "pip install no-such" }\n')
    with pytest.raises(UserError, match="needs no_such: pip install no-such"):
        find_recipe(str(tmp_path)).build_tables()
