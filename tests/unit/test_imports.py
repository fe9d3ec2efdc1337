"""Imports go one way: no files import each other, and the simulation's rooms know only those below them."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = {
    "fleetbus_schemas": "schemas/fleetbus_schemas",
    "fleetbus": "fleetbus",
    "fleetbus_workers": "workers/fleetbus_workers",
    "tests.simulation": "tests/simulation",
    "benchmarks": "benchmarks",
}
SIMULATION_ROOMS = (
    "__main__",
    "week",
    "seed_pool",
    "run",
    "timers",
    "world",
    "faults",
    "deployment",
    "clients",
    "judge",
    "doubles",
    "platform",
    "scenario",
    "observer",
)
"""From the top down."""


def list_modules(package: str, folder: Path) -> Iterator[tuple[str, Path]]:
    for file in folder.rglob("*.py"):
        parts = file.relative_to(folder).with_suffix("").parts
        yield ".".join((package, *(parts[:-1] if parts[-1] == "__init__" else parts))), file


def iterate_imports(node: ast.AST) -> Iterator[str]:
    """What is imported anywhere in a file, in functions too, but for types alone: a module, or a name in it."""
    if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
        return
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        assert not node.level, "imports name the whole module"
        yield from (f"{node.module}.{alias.name}" for alias in node.names)
    for child in ast.iter_child_nodes(node):
        yield from iterate_imports(child)


def read_graph(files: Mapping[str, Path]) -> dict[str, set[str]]:
    """The modules among ``files`` that each of them imports."""
    graph = {}
    for module, file in files.items():
        names = set(iterate_imports(ast.parse(file.read_text())))
        graph[module] = {name if name in files else name.rpartition(".")[0] for name in names} & files.keys() - {module}
    return graph


@pytest.fixture(scope="module")
def graph() -> dict[str, set[str]]:
    return read_graph(dict(item for package, folder in PACKAGES.items() for item in list_modules(package, ROOT / folder)))


def find_cycle(graph: Mapping[str, set[str]]) -> list[str]:
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_no_files_import_each_other(graph: dict[str, set[str]]) -> None:
    assert len(graph) > 700
    assert find_cycle(graph) == []


def test_a_cycle_is_found_also_within_functions_and_not_among_types(tmp_path: Path) -> None:
    (tmp_path / "one.py").write_text("def call():\n    from p.two import name\n")
    (tmp_path / "two.py").write_text("import p.three\n")
    (tmp_path / "three.py").write_text("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from p import one\n")
    assert find_cycle(read_graph(dict(list_modules("p", tmp_path)))) == []
    (tmp_path / "three.py").write_text("from p import one\n")
    assert {"p.one", "p.two", "p.three"} == set(find_cycle(read_graph(dict(list_modules("p", tmp_path)))))


def test_no_room_of_the_simulation_imports_from_one_above_it(graph: dict[str, set[str]]) -> None:
    def find_room(module: str) -> str:
        return module.removeprefix("tests.simulation.").partition(".")[0]

    height = {room: -place for place, room in enumerate(SIMULATION_ROOMS)}
    rooms = [module for module in graph if module.startswith("tests.simulation.")]
    assert {find_room(module) for module in rooms} == set(SIMULATION_ROOMS)
    ups = [
        (module, imported)
        for module in rooms
        for imported in graph[module]
        if imported in rooms and height[find_room(imported)] > height[find_room(module)]
    ]
    assert ups == []
