"""Code that `docs/api.md` shows runs as it stands there: with scripted roles in seconds, and for real behind the marker `slow`.

The real runs train from a script, from pytest and from a notebook, with an environment of the caller's own file.
"""

from __future__ import annotations

import ast
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import fleetbus
from fleetbus_workers.api import run_thread
from tests.system.scripted_roles import scripted_command

DOCS = Path(__file__).parents[2] / "docs"
EXAMPLE = DOCS / "examples" / "vowels.py"
BLOCKS = re.findall(r"```python\n(.*?)```", (DOCS / "api.md").read_text(), re.DOTALL)

pytestmark = [pytest.mark.timeout(600), pytest.mark.integration]


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("FLEETBUS_")]:
        monkeypatch.delenv(name)


async def execute(code: str, names: dict[str, Any]) -> None:
    """As a notebook does: `await` may stand outside of functions."""
    result = eval(compile(code, str(DOCS / "api.md"), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT), names)
    if inspect.isawaitable(result):
        await result


def has_risen(rewards: list[float | None]) -> bool:
    values = [reward for reward in rewards if reward is not None]
    return sum(values[-4:]) / 4 > sum(values[:4]) / 4 + 0.05


def run_script(code: str, folder: Path) -> list[str]:
    (folder / "script.py").write_text(code)
    done = subprocess.run([sys.executable, "script.py"], cwd=folder, capture_output=True, text=True, timeout=550)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


def test_the_page_shows_the_example_as_it_is() -> None:
    assert BLOCKS[0] == EXAMPLE.read_text()


async def test_every_example_of_the_page_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """But for evaluation, which needs a real policy: see below."""
    monkeypatch.setattr(run_thread, "build_role_command", scripted_command)
    names: dict[str, Any] = {"__name__": "page"}
    for block in BLOCKS:
        if "evaluate(" not in block:
            await execute(block, names)
    assert names["summary"].optimizer_steps == 3 and len(names["rewards"]) == 12
    assert len((tmp_path / "tokens.jsonl").read_text().splitlines()) == 12


@pytest.mark.slow
def test_the_example_of_the_readme_trains(tmp_path: Path) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", (DOCS.parent / "README.md").read_text(), re.DOTALL)
    lines = run_script(code.replace("steps=15", "steps=2").replace("learner_groups=4", "learner_groups=2"), tmp_path)
    assert lines[0].startswith("run vowels trains the starter policy on python-object:__main__.Vowels")


def test_a_script_trains_on_a_class_of_its_own_for_two_steps(tmp_path: Path) -> None:
    lines = run_script(
        EXAMPLE.read_text().replace("steps=15", "steps=2").replace("learner_groups=4", "learner_groups=2"), tmp_path
    )
    assert lines[0].startswith("run vowels trains the starter policy on python-object:__main__.Vowels")
    assert lines[-1].startswith("reward 0.")
    rows = list(fleetbus.open_run("vowels").tokens())
    assert len(rows) >= 32 and {row.outcome for row in rows} == {"completed"} and all(any(row.mask) for row in rows)


@pytest.mark.slow
def test_reward_rises_from_a_script(tmp_path: Path) -> None:
    run_script(EXAMPLE.read_text(), tmp_path)
    assert has_risen([step.metrics["reward"] for step in fleetbus.open_run("vowels").metrics()])


class Short:
    """An environment of this file: short answers are rewarded."""

    replayable = True

    async def open(self, task: fleetbus.Task) -> None:
        self.prompt, self.answer = task.prompt, ""

    async def reset(self) -> fleetbus.Start:
        return fleetbus.Start(messages=(fleetbus.ChatMessage(role="user", content=self.prompt),))

    async def step(self, action: fleetbus.Action) -> fleetbus.Step:
        self.answer = action.text
        return fleetbus.Step(terminated=True)

    async def state(self) -> dict[str, Any]:
        return {}

    async def verify(self) -> fleetbus.Verdict:
        return fleetbus.Verdict(reward=max(0.0, 1.0 - len(self.answer) / 40))

    async def close(self) -> None:
        """Nothing to release."""


@pytest.mark.slow
async def test_reward_rises_from_pytest_and_what_was_trained_is_evaluated() -> None:
    tasks = [{"key": f"t{number}", "prompt": "Say something."} for number in range(32)]
    settings: dict[str, Any] = {
        "learner_groups": 4,
        "learner_learning_rate": 5e-4,
        "learner_warmup_steps": 2,
        "episode_max_tokens": 10,
    }
    async with fleetbus.Run(Short, tasks, steps=15, evaluation_episodes=8, **settings) as run:
        summary = await run.finished()
        evaluation = await run.evaluate(episodes=4, samples=2)
    assert has_risen(summary.reward_by_step)
    assert (evaluation.all.graded, evaluation.version, evaluation.pinned) == (8, 15, True)
    assert evaluation.all.mean_reward > (summary.reward_by_step[0] or 0.0)


@pytest.mark.slow
def test_reward_rises_from_a_notebook(tmp_path: Path) -> None:
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    cells = [nbformat.v4.new_code_cell(BLOCKS[0])]
    evaluation = next(block for block in BLOCKS if "evaluate(" in block)
    cells.append(nbformat.v4.new_code_cell(evaluation + "assert evaluation.all.graded == 8"))
    notebook = nbformat.v4.new_notebook(cells=cells)
    nbclient.NotebookClient(notebook, timeout=500, resources={"metadata": {"path": str(tmp_path)}}).execute()
    assert has_risen([step.metrics["reward"] for step in fleetbus.open_run("vowels").metrics()])


@pytest.mark.slow
async def test_the_evaluation_of_the_page_runs() -> None:
    names: dict[str, Any] = {"__name__": "page"}
    for block in (BLOCKS[0].replace("steps=15", "steps=2"), next(block for block in BLOCKS if "evaluate(" in block)):
        await execute(block.replace("steps=15", "steps=2"), names)
    assert names["evaluation"].all.graded == 8
