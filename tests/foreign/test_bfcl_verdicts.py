"""Verdicts of `bfcl-eval` through the adapter: those of its own loop and evaluation on the same answers, of four kinds.

BFCL_TASKS is how many tasks of each category are played, ten by default; 200 is all of them.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import anyio
import pytest

from fleetbus.config.settings import Configuration, EnvironmentSettings, LimitSettings
from fleetbus_schemas import Task
from fleetbus_workers.assembly.model import find_starter_folder
from fleetbus_workers.environment.adapters.foreign import tasks as foreign_tasks
from fleetbus_workers.environment.base import EnvironmentFailed
from fleetbus_workers.environment.specs import build_environment_factory
from tests.foreign.playing import play, play_all

ROOT = Path(__file__).parents[2]
PYTHON = os.environ.get("BFCL_PYTHON", str(ROOT / ".venv-bfcl/bin/python"))
COUNT = int(os.environ.get("BFCL_TASKS", "10"))
ORIGINAL = str(Path(__file__).with_name("original_verdicts.py"))
SPEC = f"bfcl+python={PYTHON}:multi_turn"
SCENARIOS = 200

Turns = list[list[Any]]
"""Calls by turn of the user."""

pytestmark = [pytest.mark.foreign, pytest.mark.timeout(7200)]


def answer_turns(turns: Turns) -> list[Any]:
    """A step with the calls of a turn, then a text, which ends it."""
    return [answer for calls in turns for answer in ([calls, "done"] if calls else ["done"])]


def answer_reference(turns: Turns, other: Turns, draw: random.Random) -> list[Any]:
    return answer_turns(turns)


def answer_nothing(turns: Turns, other: Turns, draw: random.Random) -> list[Any]:
    return ["done" for _ in turns]


def answer_permuted(turns: Turns, other: Turns, draw: random.Random) -> list[Any]:
    """Another task's calls; or the task's own in another order, of its turns or of its calls."""
    shuffled = draw.sample(turns, len(turns))
    return answer_turns(draw.choice([other, shuffled, [calls[::-1] for calls in turns]]))


def answer_wrongly(turns: Turns, other: Turns, draw: random.Random) -> list[Any]:
    """The reference but for one call: another value, left out, made twice, a tool that there is not, or no call at all."""
    wrong = [[[name, dict(arguments)] for name, arguments in calls] for calls in turns]
    calls = draw.choice([each for each in wrong if each])
    name, arguments = call = draw.choice(calls)
    kind = draw.choice(["value", "less", "twice", "tool", "python", "text"])
    if kind == "value" and arguments:
        key = draw.choice(list(arguments))
        arguments[key] = draw.choice([f"{arguments[key]}x", 7, None, [arguments[key]]])
    elif kind == "twice":
        calls.append(call)
    elif kind == "tool":
        call[0] = f"{name}_please"
    elif kind == "python":
        arguments["1) or print(2"] = 0
    else:
        calls.remove(call)
    answers = answer_turns(wrong)
    return ["I will not.", *answers[1:]] if kind == "text" else answers


KINDS: dict[str, Callable[[Turns, Turns, random.Random], list[Any]]] = {
    "reference": answer_reference,
    "empty": answer_nothing,
    "permuted": answer_permuted,
    "wrong": answer_wrongly,
}


async def ask_original(*words: str) -> Any:
    done = await anyio.run_process([PYTHON, ORIGINAL, *words], stderr=subprocess.DEVNULL)
    return json.loads(done.stdout.splitlines()[-1])


def build(isolation: Literal["auto", "off"]) -> Any:
    settings = Configuration(environment=EnvironmentSettings(agent_isolation=isolation), limits=LimitSettings(reset=600))
    return build_environment_factory(SPEC, verifier=None, configuration=settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", KINDS)
async def test_verdicts_are_those_of_the_packages_own_evaluation(kind: str, tmp_path: Path) -> None:
    references: dict[str, Turns] = await ask_original("--reference")
    keys, draw = list(references), random.Random(kind)
    episodes = []
    for place, key in enumerate(keys):
        answers = KINDS[kind](references[key], references[keys[place - 1]], draw)
        if place % SCENARIOS % (SCENARIOS // COUNT) == 0:
            episodes.append((key, answers))
    file = tmp_path / "episodes.json"
    file.write_text(json.dumps(episodes))
    theirs = await ask_original(str(file))
    ours = await play_all(SPEC, episodes)
    equal = sum(mine == its for mine, its in zip(ours, theirs, strict=True))
    print(f"{kind}: {equal} of {len(theirs)} equal; valid: {sum(theirs):g}; excluded: {ours.count(None)}")
    assert ours == theirs
    if kind in ("reference", "empty"):
        assert set(ours) == {float(kind == "reference")}


async def test_what_is_no_call_of_a_tool_is_never_evaluated(tmp_path: Path) -> None:
    """BFCL hands to Python's ``eval`` what the policy wrote: its own evaluation makes these files. It is played without the
    sandbox, which would hide them."""
    files = [tmp_path / str(number) for number in range(4)]
    opened = [f"open({str(file)!r}, 'w')" for file in files]
    calls = [
        ["open", {"file": str(files[0]), "mode": "w"}],
        [f"{opened[1]} or ls", {}],
        ["ls", {f"a={opened[2]}, b": True}],
        ["ls", {f"**dict(a={opened[3]}), b": True}],
    ]
    factory = build("off")
    async with factory.run():
        verdict = await play(factory, "multi_turn_base_0", [[each] for each in calls], "done")
    assert verdict is not None and verdict.reward == 0.0
    assert [file.name for file in files if file.exists()] == []


def test_names_of_the_function_that_evaluates_are_no_tools(tmp_path: Path) -> None:
    inside = ROOT / "workers/fleetbus_workers/environment/adapters/foreign/inside"
    asked = [{name: "{}"} for name in ("method", "class_", "ls")]
    code = f"import sys; sys.path.insert(0, {str(inside)!r}); import fleetbus_bfcl as bfcl"
    code += f"; print(bfcl.build_handler('http://127.0.0.1').decode_execute({asked!r}, False))"
    variables = os.environ | {"BFCL_PROJECT_ROOT": str(tmp_path)}
    done = subprocess.run([PYTHON, "-c", code], cwd=tmp_path, env=variables, capture_output=True, text=True, check=True)
    assert done.stdout.strip().endswith("['no_such_tool()', 'no_such_tool()', 'ls()']")


def list_tasks(split: str) -> dict[str, list[int]]:
    """The numbers of the scenarios of a split, by category."""
    found: dict[str, list[int]] = {}
    for task in foreign_tasks.list_tasks(f"bfcl:multi_turn split={split}", PYTHON, 1000).tasks:
        category, _, number = task["key"].rpartition("_")
        found.setdefault(category, []).append(int(number))
        assert task["env_key"] == category
    return found


def test_a_scenario_is_on_one_side_of_the_split_in_all_categories() -> None:
    train, held_out = list_tasks("train"), list_tasks("held_out")
    assert len(train) == len(held_out) == 4
    assert all(numbers == list(range(4, SCENARIOS, 5)) for numbers in held_out.values())
    assert all(sorted(train[category] + held_out[category]) == list(range(SCENARIOS)) for category in train)


async def test_a_task_of_other_data_is_refused_and_not_rewarded() -> None:
    factory = build("auto")
    config = {"id": "multi_turn_base_0", "digest": "sha256:other"}
    async with factory.run():
        environment = factory()
        await environment.open(Task(key="t", prompt="", config=config))
        with pytest.raises(EnvironmentFailed, match=r"the task is of sha256:other, and bfcl-eval \S+ here of sha256:"):
            await environment.reset()
        await environment.close()


def test_a_model_is_evaluated_by_category_and_the_report_says_of_what(tmp_path: Path) -> None:
    """The starter policy, which can call no such tools, told that it takes as long a context as they need."""
    model = tmp_path / "model"
    shutil.copytree(find_starter_folder(), model)
    config = json.loads((model / "config.json").read_text()) | {"max_position_embeddings": 32_768}
    (model / "config.json").write_text(json.dumps(config))
    limits = {"FLEETBUS_EPISODE_MAX_TURNS": "2", "FLEETBUS_EPISODE_MAX_TOKENS": "16"}
    command = [sys.executable, "-m", "fleetbus_workers.cli", "evaluate", "--benchmark", "bfcl-multi-turn", "--json"]
    ended = subprocess.run(
        [*command, "--model", str(model), "--environment-python", PYTHON, "--episodes", "4"],
        cwd=tmp_path, env=os.environ | limits, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    report = json.loads(ended.stdout)
    told = report["benchmark"]
    assert (told["name"], told["package"], told["tasks"]) == ("bfcl-multi-turn", "bfcl-eval", 800)
    assert told["digest"].startswith("sha256:") and told["version"]
    assert set(report["environments"]) == {f"multi_turn_{each}" for each in ("base", "miss_func", "miss_param", "long_context")}
    assert (report["all"]["episodes"], report["all"]["graded"], report["all"]["success"]) == (4, 4, 0.0)
