"""`import fleetbus`: cheap, complete, and unchanged unless the snapshot of the public names changes with it."""

from __future__ import annotations

import ast
import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import fleetbus

ROOT = Path(__file__).parents[2]
HINT = "run `python docs/reference/build_api.py`, and say in CHANGELOG.md what changed"

IMPORT = """
import sys, time
before = set(sys.modules)
began = time.process_time()  # what other processes take of the machine is not ours
import fleetbus
seconds = time.process_time() - began
loaded = {name.partition(".")[0] for name in sys.modules} - before
heavy = sorted(loaded & {"torch", "mcp", "nats", "anyio", "msgspec", "typing", "fleetbus_workers"})
print(seconds, heavy)
"""


@pytest.fixture(scope="module")
def builder() -> ModuleType:
    spec = importlib.util.spec_from_file_location("build_api", ROOT / "docs" / "reference" / "build_api.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run_python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60).stdout


def test_importing_takes_60_ms_at_most_and_loads_nothing_heavy() -> None:
    outputs = [run_python(IMPORT).split(maxsplit=1) for _ in range(3)]
    assert min(float(seconds) for seconds, _ in outputs) <= 0.06
    assert {heavy.strip() for _, heavy in outputs} == {"[]"}


def test_environments_are_written_without_loading_torch_mcp_or_nats() -> None:
    names = "Environment, Start, Step, Verdict, EnvironmentFailed, Task, Action, ChatMessage, ToolCall, ToolSpec, UserError"
    code = (
        f"import sys; from fleetbus import {names}; print([n for n in ('torch', 'mcp', 'nats', 'anyio') if n in sys.modules])"
    )
    assert run_python(code).strip() == "[]"


def test_every_public_name_is_there_once_and_typed() -> None:
    assert sorted(fleetbus._PUBLIC) == sorted(fleetbus.__all__)
    assert set(fleetbus.__all__) <= set(dir(fleetbus))
    for name in fleetbus.__all__:
        assert getattr(fleetbus, name) is not None
    tree = ast.parse((ROOT / "fleetbus" / "__init__.pyi").read_text())
    typed = {alias.asname for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names} - {None}
    assert typed == set(fleetbus.__all__) - {"__version__"}
    (listed,) = (node for node in tree.body if isinstance(node, ast.Assign) and "__all__" in ast.unparse(node.targets[0]))
    assert ast.literal_eval(listed.value) == fleetbus.__all__


def test_a_name_that_is_not_public_is_refused_as_modules_do() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'nonsense'"):
        fleetbus.nonsense  # type: ignore[attr-defined]  # noqa: B018
    with pytest.raises(ImportError, match="cannot import name 'nonsense'"):
        exec("from fleetbus import nonsense")


def test_the_public_names_are_those_of_the_snapshot(builder: ModuleType) -> None:
    assert builder.SNAPSHOT.read_text() == builder.build_snapshot(), HINT


def test_the_reference_is_current(builder: ModuleType) -> None:
    assert builder.REFERENCE.read_text() == builder.build_reference(), HINT


def test_what_is_public_has_a_docstring(builder: ModuleType) -> None:
    members = [
        (f"{name}.{member}", found)
        for name in fleetbus._PUBLIC
        if name != "__version__"
        for member, found in builder._list_members(name, getattr(fleetbus, name))
    ]
    values = [(name, getattr(fleetbus, name)) for name in fleetbus._PUBLIC if name != "__version__"]
    assert [name for name, value in values + members if not value.__doc__] == []


def test_the_command_line_is_started_as_a_module_too() -> None:
    output = subprocess.run(
        [sys.executable, "-m", "fleetbus", "--version"], check=True, capture_output=True, text=True, timeout=60
    ).stdout
    assert output == f"fleetbus {fleetbus.__version__}\n"


@pytest.mark.parametrize("package", ["fleetbus", "schemas/fleetbus_schemas", "workers/fleetbus_workers"])
def test_every_package_says_that_it_is_typed(package: str) -> None:
    assert (ROOT / package / "py.typed").is_file()
