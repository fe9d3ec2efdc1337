"""ARCHITECTURE.md and README.md say what is true of the tree."""

from __future__ import annotations

import re
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import click

ROOT = Path(__file__).parents[2]


def load_file_map() -> ModuleType:
    spec = spec_from_file_location("file_map", ROOT / "docs/file_map.py")
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_source_file_says_what_it_is_for() -> None:
    file_map = load_file_map()
    sources = list(file_map.list_sources())
    assert len(sources) > 300
    assert [path for path in sources if not file_map.read_purpose(path)] == []


def test_the_architecture_fits_on_two_pages_and_names_only_what_exists() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text()
    assert len(text.splitlines()) <= 120
    paths = re.findall(r"`((?:schemas|fleetbus|workers|docs|tests|benchmarks)/[\w/.]*)`", text)
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_twelve_usual_changes_take_four_places_at_most() -> None:
    table = (ROOT / "CONTRIBUTING.md").read_text().partition("| to add |")[2].partition("\n\n")[0]
    rows = [line.split("|")[1:3] for line in table.splitlines()[2:]]
    assert len(rows) == 12
    places = {change: re.findall(r"`([\w.-]+(?:/[\w./-]*)|pyproject\.toml)`", files) for change, files in rows}
    assert not [place for found in places.values() for place in found if not (ROOT / place).exists()]
    assert {change: found for change, found in places.items() if not 1 <= len(set(found)) <= 4} == {}


def test_the_readme_begins_with_two_commands_of_one_line_each() -> None:
    text = (ROOT / "README.md").read_text()
    blocks = re.findall(r"^```(\w+)\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
    assert [language for language, _ in blocks[:2]] == ["sh", "sh"]
    assert {language for language, _ in blocks[2:]} == {"console", "python"}
    assert all(len(block.splitlines()) == 1 for _, block in blocks[:2])
    assert blocks[0][1].rstrip().endswith("fleetbus up") and blocks[1][1].rstrip().endswith("pytest -q")


def test_every_command_and_flag_in_the_readme_exists() -> None:
    from fleetbus_workers.cli.program import COMMANDS, program

    lines = (ROOT / "README.md").read_text().splitlines()
    text = "\n".join(
        line for line in lines if "benchmarks/" not in line and "pip install" not in line
    )  # those have flags of their own
    commands = [program.get_command(click.Context(program), name) for name in COMMANDS]
    flags = {flag for command in commands if command for option in command.params for flag in option.opts} | {"--help"}
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", text)) <= flags | {"--enable-scale-out"}, "the last one is vLLM's"
    assert set(re.findall(r"[`$] ?(?:\w+=\w+ )?fleetbus ([a-z]+)", text)) <= set(COMMANDS)
