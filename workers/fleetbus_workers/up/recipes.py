"""Recipes: folders with a configuration, a page, and the code that makes their tasks. `fleetbus up --recipe NAME`.

``recipe.toml`` has the tables of a configuration, in which ``{recipe}`` stands for the recipe's own folder, and a table
``[recipe]`` (see `About`). Tasks that code makes are written into the cache once, under the digest of what they are.
"""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from fleetbus.config.load import read_tables
from fleetbus.errors import UserError
from fleetbus.files import create_folder, find_cache_folder, replace_file
from fleetbus.user_code import load_callable

FILE = "recipe.toml"
CURVE = "expected.json"
TASKS_FUNCTION = "build_tasks"
OWN_FOLDER = "{recipe}"


class About(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A recipe's description of itself. ``tasks``: a file of its folder whose `TASKS_FUNCTION` makes them. ``starter``: its
    model is a starter policy that is built for it. ``needs``: packages that are imported, and the command that installs each.
    ``measured``: what was found; empty if nothing was measured."""

    title: str
    model: str
    tasks: str = ""
    starter: bool = False
    needs: dict[str, str] = {}
    measured: str = ""


class Recipe(msgspec.Struct, frozen=True, kw_only=True):
    """A recipe in its ``folder``; ``tables`` are those of its configuration, as they stand in the file."""

    name: str
    folder: Path
    about: About
    tables: dict[str, dict[str, Any]]

    def build_tables(self) -> dict[str, object]:
        """The tables for a run of this name, its tasks written if code makes them. Raises `UserError`."""
        for package, install in self.about.needs.items():
            if importlib.util.find_spec(package) is None:
                raise UserError(f"recipe {self.name} needs {package}: {install}")
        own = {name: _place(table, self.folder) for name, table in self.tables.items()}
        run = {"name": self.name, **own.get("run", {})}
        if self.about.tasks:
            run["tasks"] = str(write_tasks(self))
        return {**own, "run": run}


def find_recipes_folder() -> Path:
    """The folder of the recipes that ship: in the installed package, else at the root of the checkout."""
    package = Path(__file__).parents[1]
    installed = package / "recipes"
    return installed if installed.is_dir() else package.parents[1] / "recipes"


def list_recipes() -> list[Recipe]:
    """All recipes that ship, by name."""
    return [read_recipe(file.parent) for file in sorted(find_recipes_folder().glob(f"*/{FILE}"))]


def find_recipe(name: str) -> Recipe:
    """The recipe of a name, or in a folder of one's own. Raises `UserError` with the names that there are."""
    for folder in (find_recipes_folder() / name, Path(name).expanduser()):
        if (folder / FILE).is_file():
            return read_recipe(folder.absolute())
    raise UserError(f"no recipe {name!r}: there are {', '.join(recipe.name for recipe in list_recipes())}")


def read_recipe(folder: Path) -> Recipe:
    """The recipe in a folder. Raises `UserError`."""
    content = read_tables(folder / FILE)
    try:
        about = msgspec.convert(content.pop("recipe", {}), About)
        tables = msgspec.convert(content, dict[str, dict[str, Any]])
    except msgspec.ValidationError as error:
        raise UserError(f"{folder / FILE}: {error}") from error
    return Recipe(name=folder.name, folder=folder, about=about, tables=tables)


def write_tasks(recipe: Recipe) -> Path:
    """The tasks file of a recipe, in the cache, the same for the same tasks. Raises `UserError`."""
    build = load_callable(f"recipe {recipe.name}", f"{recipe.folder / recipe.about.tasks}:{TASKS_FUNCTION}")
    content = msgspec.json.format(msgspec.json.encode(build()), indent=1) + b"\n"
    file = find_cache_folder() / "recipes" / f"{recipe.name}-{hashlib.sha256(content).hexdigest()[:12]}.json"
    create_folder(file.parent)
    if not file.is_file() or file.read_bytes() != content:
        replace_file(file, content)
    return file


def format_recipes() -> Iterator[str]:
    """One line per recipe: name, model, title, what was measured."""
    recipes = list_recipes()
    width = max((len(recipe.name) for recipe in recipes), default=0)
    for recipe in recipes:
        about = recipe.about
        yield f"{recipe.name:<{width}}  {about.model:<14}  {about.title}; {about.measured or 'not measured'}"


def _place(table: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    return {key: value.replace(OWN_FOLDER, str(folder)) if isinstance(value, str) else value for key, value in table.items()}
