"""Names of ours in docstrings, comments and documentation exist: code, modules, files, commands, settings and records.

In Python a name in single backticks is one of the code, a literal stands in double ones; in Markdown a name is taken for one of
ours by how it looks.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CODE = ("schemas", "fleetbus", "workers", "benchmarks", "tests/simulation", "tests/support")
DOCS = ("*.md", "docs/*.md", "docs/[!d]*/**/*.md", "docs/decisions/*.md")
GENERATED = ("docs/reference/",)
HISTORY = ("CHANGELOG.md",)
NAME = re.compile(r"\.?[A-Za-z_]\w*(?:\.\w+)*(?:\(\))?")
MODULE = re.compile(r"(?:fleetbus|fleetbus_workers|fleetbus_schemas)(?:\.[a-z_]\w*)+(?:\.[A-Z]\w*)?(?:\(\))?")
FILE = re.compile(r"[\w.-]+(?:/[\w.-]+)+\.(?:py|md|sh|svg|toml|yaml)|[a-z]\w*\.py")
NO_MODULE = re.compile(r"fleetbus\.(?:toml|segments?|request|session|reward)\b.*")
"""A file, and attributes of spans."""
FILE_ENDINGS = (".json", ".jsonl", ".md", ".png", ".py", ".toml", ".txt", ".yaml")
COMMAND = re.compile(r"fleetbus ([a-z]+)\b")
OURS = ("schemas/", "fleetbus/", "workers/", "benchmarks/", "tests/", "docs/", "deploy/", ".ci/")
RECORD = re.compile(r"\bdocs/decisions/(\d{4})|\b(?:decisions?|records?|Records?) (\d{4})\b")


def list_files(folders: tuple[str, ...], pattern: str) -> list[Path]:
    return sorted(file for folder in folders for file in (ROOT / folder).rglob(pattern) if "__pycache__" not in file.parts)


def list_pages() -> list[Path]:
    found = {file for pattern in DOCS for file in ROOT.glob(pattern)}
    return sorted(file for file in found if file.name not in HISTORY)


@cache
def list_names() -> frozenset[str]:
    """Every identifier of the code, and every folder and file of it."""
    names = {part.removesuffix(".py") for file in list_files((*CODE, "tests"), "*") for part in file.relative_to(ROOT).parts}
    for file in list_files(CODE, "*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            match node:
                case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name):
                    names.add(name)
                case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                    names.add(name)
                case ast.alias(name=name):
                    names |= set(name.split("."))
                case ast.keyword(arg=str(name)):
                    names.add(name)
    return frozenset(names)


def list_words(text: str) -> Iterator[tuple[int, str]]:
    """Docstrings, also those of attributes, and comments, with their lines."""
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.Expr(value=ast.Constant(value=str(words)), lineno=line):
                yield line, words
    if re.search(r"#.*(`|docs/|decision|record)", text):
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.COMMENT:
                yield token.start[0], token.string


def find_unknown_names(words: str) -> Iterator[str]:
    """Names in single backticks that the code does not have."""
    for quoted in re.findall(r"(?<!`)`([^`\n]+)`(?!`)", words):
        if FILE.fullmatch(quoted):
            if not is_file(quoted):
                yield quoted
        elif NAME.fullmatch(quoted) and not set(quoted.strip(".").removesuffix("()").split(".")) <= list_names():
            yield quoted


@cache
def list_paths() -> tuple[str, ...]:
    return tuple(f"/{file.relative_to(ROOT)}" for file in list_files((*CODE, "tests", "docs", "deploy"), "*"))


def is_file(name: str) -> bool:
    """True if the path exists from the root, or is the end of one below it."""
    return (ROOT / name).exists() or any(path.endswith(f"/{name}") for path in list_paths())


def is_module(name: str) -> bool:
    """True if the longest part of the name that is a module defines, or imports, what follows."""
    parts = name.removesuffix("()").split(".")
    place = {"fleetbus": "fleetbus", "fleetbus_workers": "workers/fleetbus_workers"}.get(parts[0], "schemas/fleetbus_schemas")
    path = ROOT / place
    for index, part in enumerate(parts[1:], start=1):
        file = path.with_suffix(".py") if path.with_suffix(".py").is_file() else path / "__init__.py"
        if not (path / part).is_dir() and not (path / f"{part}.py").is_file():
            return re.search(rf"\b{part}\b", file.read_text()) is not None and set(parts[index:]) <= list_names()
        path /= part
    return True


def find_missing(words: str) -> Iterator[str]:
    """Modules, files and records of ours that are named and do not exist."""
    for quoted in re.findall(r"`+([^`\n]+)`+", words):
        is_wrong_module = MODULE.fullmatch(quoted) and not NO_MODULE.fullmatch(quoted) and not is_module(quoted)
        if is_wrong_module or (quoted.startswith(OURS) and not is_place(quoted)):
            yield quoted
    for number in {first or second for first, second in RECORD.findall(words)}:
        if not list((ROOT / "docs/decisions").glob(f"{number}-*.md")):
            yield f"record {number}"


def is_place(quoted: str) -> bool:
    """True if it is no plain path, or one that exists; ``::NAME`` after it is a test."""
    path, _, _ = quoted.partition("::")
    return not re.fullmatch(r"[\w./-]+", path) or is_file(path.rstrip("/")) or path.startswith(("docs/decisions/", *GENERATED))


@pytest.mark.parametrize("folder", CODE)
def test_names_in_docstrings_and_comments_exist(folder: str) -> None:
    found = [
        f"{file.relative_to(ROOT)}:{line}: {name}"
        for file in list_files((folder,), "*.py")
        for line, words in list_words(file.read_text())
        for name in (*find_unknown_names(words), *find_missing(words))
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("page", list_pages(), ids=lambda page: page.relative_to(ROOT).as_posix())
def test_names_in_the_documentation_exist(page: Path) -> None:
    assert not list(find_missing(page.read_text()))


@pytest.mark.parametrize("page", list_pages(), ids=lambda page: page.relative_to(ROOT).as_posix())
def test_settings_that_the_documentation_names_exist(page: Path) -> None:
    from fleetbus.config.fields import list_settings

    settings = {setting.name for setting in list_settings()}
    tables = {name.split(".")[0] for name in settings} - {"run"}  # `run.evaluate` is a call of the Python API
    quoted = re.findall(r"`([a-z]+\.[a-z][a-z_0-9]*)(?: = [^`]+)?`", page.read_text())
    named = [name for name in quoted if name.split(".")[0] in tables and not name.endswith(FILE_ENDINGS)]
    assert not [name for name in named if name not in settings]


def test_commands_that_docstrings_name_exist() -> None:
    from fleetbus_workers.cli.program import COMMANDS

    words = "\n".join(words for file in list_files(CODE, "*.py") for _, words in list_words(file.read_text()))
    named = {command for quoted in re.findall(r"`+([^`\n]+)`+", words) for command in COMMAND.findall(quoted)}
    assert len(named) > 15 and named <= set(COMMANDS)


def test_what_does_not_exist_is_found() -> None:
    assert list(find_unknown_names("`NoSuchName`, `Bus.no_such_call`, ``a_literal``, `Bus.publish`, `no_such_file.py`")) == [
        "NoSuchName",
        "Bus.no_such_call",
        "no_such_file.py",
    ]
    words = "`fleetbus.core.no_such` `fleetbus.bus.base.Bus` ``docs/no_such.md`` `tests/unit/test_docs.py::a` (decision 9999)"
    assert list(find_missing(words)) == ["fleetbus.core.no_such", "docs/no_such.md", "record 9999"]
