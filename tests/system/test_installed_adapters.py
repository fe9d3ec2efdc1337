"""Adapters of other packages: the one that the docs show is found by its name, and what is wrong with others is one line."""

from __future__ import annotations

import importlib
import inspect
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import anyio
import pytest

from fleetbus.errors import UserError
from fleetbus_schemas import Task
from fleetbus_workers.environment.adapter_context import EnvironmentFactory
from fleetbus_workers.environment.keyed_specs import check_forms
from fleetbus_workers.environment.specs import _PACKAGE, ADAPTERS, build_environment_factory, is_own_class
from tests.support.small_deployment import build_configuration, small_deployment
from tests.support.tool_calls import NoGrader

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "adapter"
Install = Callable[..., Path]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Lays a package out as an installer does: its modules beside a folder of metadata with its entry points."""

    def install(name: str, entries: dict[str, str], *modules: Path) -> Path:
        folder = tmp_path / name
        information = folder / f"{name}-0.1.dist-info"
        information.mkdir(parents=True)
        lines = [f"{key} = {value}\n" for key, value in entries.items()]
        (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.1\n")
        (information / "entry_points.txt").write_text("".join(["[fleetbus.environments]\n", *lines]))
        for module in modules:
            shutil.copy(module, folder)
        monkeypatch.setattr(sys, "path", [*sys.path, str(folder)])
        return folder

    return install


@pytest.fixture
def example(install: Install) -> Path:
    project = tomllib.loads((EXAMPLE / "pyproject.toml").read_text())["project"]
    entries = project["entry-points"]["fleetbus.environments"]
    return install("fleetbus_dice", entries, EXAMPLE / "fleetbus_dice.py")


def build(spec: str) -> EnvironmentFactory:
    return build_environment_factory(spec, verifier=NoGrader())


@pytest.mark.usefixtures("example")
async def test_the_example_s_environment_is_played_by_a_fleet() -> None:
    factory = build("dice:6")
    with anyio.fail_after(50):
        async with factory.run(), small_deployment(build_configuration()) as fleet:
            fleet.environment("environment", make=factory)
            fleet.inference("inference")
            await fleet.request("e", task=Task(key="t", seed=1))
            result = await fleet.result("e")
    assert (result.outcome, result.reward) == ("completed", 0.0)


def test_a_worker_s_process_finds_it_and_its_own_mistakes_are_one_line(example: Path) -> None:
    for spec, line in (("dice:6", "ok  task t"), ("dice:one", "must be 2 or more, as in dice:6")):
        tasks = example / "tasks.json"
        tasks.write_text('[{"key": "t", "prompt": "Play.", "seed": 1}]')
        done = subprocess.run(
            [sys.executable, "-m", "fleetbus", "check", spec, "--tasks", str(tasks), "--action", "3"],
            env={"PYTHONPATH": str(example), "PATH": "/usr/bin:/bin"},
            capture_output=True,
            text=True,
            timeout=50,
        )
        said = done.stdout + done.stderr
        assert line in said and "Traceback" not in said, said
        assert (done.returncode == 2) == (spec == "dice:one"), said


@pytest.mark.usefixtures("example")
def test_a_spec_is_checked_without_importing_the_package() -> None:
    sys.modules.pop("fleetbus_dice", None)
    check_forms("dice\ndice2=dice:6")
    assert "fleetbus_dice" not in sys.modules and not is_own_class("dice:6") and is_own_class("guess:Guess")


def test_without_the_package_the_name_is_a_module_s_and_with_it_the_error_lists_it(install: Install) -> None:
    with pytest.raises(UserError, match="cannot import dice"):
        build("dice:Six")
    install("brought", {"brought-kind": "nowhere:build"})
    with pytest.raises(UserError, match=r"is none of: .*, brought-kind"):
        build("unknown")


def test_a_name_of_two_packages_is_refused_and_ours_stay_ours(install: Install) -> None:
    install("one", {"twice": "one:build", "scripted": "one:build"})
    install("two", {"twice": "two:build"})
    with pytest.raises(UserError, match="comes with one and two"):
        build("twice")
    assert build("scripted:2")().replayable


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("raise ValueError('broken')", "cannot import faulty: ValueError: broken"),
        ("def other(context): pass", "has no 'build'"),
        ("def build(context): return 3", "gave int, not a class or callable"),
        ("class build:\n    def __init__(self, context): pass\n    def __call__(self): return 3", "lacks open, reset, step"),
    ],
)
def test_a_faulty_adapter_is_one_line(install: Install, monkeypatch: pytest.MonkeyPatch, body: str, said: str) -> None:
    folder = install("faulty", {"faulty-kind": "faulty:build"})
    (folder / "faulty.py").write_text(body)
    monkeypatch.delitem(sys.modules, "faulty", raising=False)
    with pytest.raises(UserError, match=said):
        build("faulty-kind")
    sys.modules.pop("faulty", None)


async def test_a_factory_s_own_run_is_entered_around_its_environments(install: Install) -> None:
    folder = install("pooled", {"pooled": "pooled_kind:Pool"})
    (folder / "pooled_kind.py").write_text(POOL)
    factory = build("pooled:x")
    async with factory.run():
        assert sys.modules["pooled_kind"].events == ["begun x"]
        assert factory().replayable
    assert sys.modules.pop("pooled_kind").events == ["begun x", "ended"]


POOL = """
from contextlib import asynccontextmanager

events = []

class Game:
    replayable = True

class Pool:
    def __init__(self, context):
        self.name = context.rest

    def __call__(self):
        return Game()

    @asynccontextmanager
    async def run(self):
        events.append(f"begun {self.name}")
        yield
        events.append("ended")
"""


def test_every_adapter_of_ours_has_the_one_signature() -> None:
    for adapter in ADAPTERS:
        module, _, function = adapter.build.partition(":")
        try:
            found = importlib.import_module(f"{_PACKAGE}.{module}")
        except ModuleNotFoundError:  # a package of an extra that is not installed here
            continue
        assert list(inspect.signature(getattr(found, function)).parameters) == ["context"], adapter.forms
