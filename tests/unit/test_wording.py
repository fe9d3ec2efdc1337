"""Docstrings say first what a thing is or does, never with a question that the reader has to turn into a statement."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("schemas/fleetbus_schemas", "fleetbus", "workers/fleetbus_workers")
QUESTION = re.compile(r"(What|Which|Whether|Who|Whose|How|Where|When|Why)\b")


def find_questions(text: str, *, modules_only: bool = False) -> Iterator[int]:
    """The lines of docstrings that begin with a question word."""
    tree = ast.parse(text)
    for node in [tree] if modules_only else ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            docstring = ast.get_docstring(node)
            if docstring is not None and QUESTION.match(docstring):
                yield node.body[0].lineno


@pytest.mark.parametrize("package", PACKAGES)
def test_no_docstring_begins_with_a_question(package: str) -> None:
    files = sorted((ROOT / package).rglob("*.py"))
    found = [f"{file.relative_to(ROOT)}:{line}" for file in files for line in find_questions(file.read_text())]
    assert files and not found, found


def test_no_file_of_tests_or_benchmarks_begins_with_a_question() -> None:
    files = sorted(file for folder in ("tests", "benchmarks") for file in (ROOT / folder).rglob("*.py"))
    found = [str(file.relative_to(ROOT)) for file in files if list(find_questions(file.read_text(), modules_only=True))]
    assert files and not found, found


def test_a_question_is_found_wherever_a_docstring_stands() -> None:
    text = '"""What it is."""\nclass A:\n    """Whether it is."""\n    async def b(self):\n        """How it is."""\n'
    assert list(find_questions(text)) == [1, 3, 5]
    assert list(find_questions(text, modules_only=True)) == [1]
    assert not list(find_questions('"""Whatever it is."""\n\nwhat = """What no docstring is."""\n'))
