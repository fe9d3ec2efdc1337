"""``fleetbus new environment NAME``: a working environment in one file, its test, and tasks to play."""

import importlib.util
import keyword
import re
import shlex
from pathlib import Path

import click

from fleetbus.errors import UserError
from fleetbus_workers.cli.setup.new_environment import build_files

MOST_CHARS = 64


@click.group("new")
def command() -> None:
    """Create starter files for your own project."""


@command.command("environment", short_help="An environment of your own, its tasks and its test")
@click.argument("name")
@click.option("--sync", is_flag=True, help="Write ordinary functions, for blocking code; the worker runs them in threads")
@click.option("--folder", type=click.Path(path_type=Path, file_okay=False), default=Path("."), help="Where to write [.]")
def environment(name: str, sync: bool, folder: Path) -> int:
    """Write NAME.py (an environment that plays a guessing game), test_NAME.py and NAME_tasks.json.

    NAME is in lower case, like a Python module. Existing files are never overwritten.
    """
    if not re.fullmatch(rf"[a-z][a-z0-9_]{{0,{MOST_CHARS - 1}}}", name) or keyword.iskeyword(name):
        shown = name if len(name) <= MOST_CHARS else f"{name[:MOST_CHARS]}..."
        raise UserError(
            f"{shown!r} is not a module name; use at most {MOST_CHARS} lower-case letters, digits and _, as in my_game"
        )
    files = {folder / file: text for file, text in build_files(name, asynchronous=not sync).items()}
    present = [str(path) for path in files if path.exists()]
    if present:
        raise UserError(f"already exists: {', '.join(present)}; choose another name or --folder")
    if importlib.util.find_spec(name):
        raise UserError(f"Python already has a module {name}, which yours would hide; choose another name")
    written: list[Path] = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path, text in files.items():
            with path.open("x", encoding="utf-8") as file:
                written.append(path)
                file.write(text)
    except OSError as error:
        for path in written:
            path.unlink(missing_ok=True)
        raise UserError(f"{folder}: cannot be written to ({error.strerror}); choose another folder with --folder") from error
    kind = "".join(part.capitalize() for part in name.split("_"))
    for path in files:
        print(f"wrote {path}")
    print(f"test it:  python -m pytest {folder / f'test_{name}.py'}")
    there = "" if folder == Path(".") else f"cd {shlex.quote(str(folder))} && "
    print(f"check it: {there}fleetbus check {name}:{kind} --tasks {name}_tasks.json")
    print(f"train it: {there}fleetbus up --run {name} --environment {name}:{kind} --tasks {name}_tasks.json")
    return 0
