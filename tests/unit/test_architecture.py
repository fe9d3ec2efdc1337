"""ARCHITECTURE.md and README.md say what is true of the tree."""

from __future__ import annotations

import re
from pathlib import Path

import click
import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("schemas", "fleetbus", "workers")


def source_files() -> list[str]:
    files = (path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
    return sorted(path.relative_to(ROOT).as_posix() for path in files if not path.name.startswith("__"))


@pytest.fixture(scope="module")
def mapped() -> str:
    text = (ROOT / "ARCHITECTURE.md").read_text()

    def spread(match: re.Match[str]) -> str:
        return " ".join(f"{match[1]}{name}{match[3]}" for name in match[2].split(","))

    return re.sub(r"([\w/]*)\{([\w,]+)\}([\w./]*)", spread, text)


def test_every_source_file_has_its_purpose_in_the_architecture(mapped: str) -> None:
    """By its own name, or by that of a folder below a package whose files are described together."""
    marked = mapped.replace(".py ", ".py` ")

    def is_mapped(file: str) -> bool:
        folder, _, name = file.rpartition("/")
        return bool(re.search(rf"(?<![\w-]){re.escape(name)}`", marked)) or f"| `{folder}/` |" in mapped

    assert [file for file in source_files() if not is_mapped(file)] == []


def test_the_architecture_names_no_file_that_is_gone(mapped: str) -> None:
    present = {Path(file).name for file in source_files()} | {path.name for path in (ROOT / "benchmarks").glob("*.py")}
    named = set(re.findall(r"([\w]+\.py)\b", mapped))
    assert named <= present | {"base.py"}


def test_the_readme_begins_with_two_commands_of_one_line_each() -> None:
    text = (ROOT / "README.md").read_text()
    blocks = re.findall(r"^```(\w+)\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
    assert [language for language, _ in blocks[:2]] == ["sh", "sh"]
    assert {language for language, _ in blocks[2:]} == {"console"}
    assert all(len(block.splitlines()) == 1 for _, block in blocks[:2])
    assert blocks[0][1].rstrip().endswith("fleetbus up") and blocks[1][1].rstrip().endswith("pytest -q")


def test_every_command_and_flag_in_the_readme_exists() -> None:
    from fleetbus_workers.cli.program import COMMANDS, program

    lines = (ROOT / "README.md").read_text().splitlines()
    text = "\n".join(line for line in lines if "benchmarks/" not in line)  # those have flags of their own
    commands = [program.get_command(click.Context(program), name) for name in COMMANDS]
    flags = {flag for command in commands if command for option in command.params for flag in option.opts} | {"--help"}
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", text)) <= flags | {"--enable-scale-out"}, "the last one is vLLM's"
    assert set(re.findall(r"[`$] ?(?:\w+=\w+ )?fleetbus ([a-z]+)", text)) <= set(COMMANDS)
