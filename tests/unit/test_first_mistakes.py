"""Mistakes of people in their first hour: each is said, or simply works."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from fleetbus import Action, ChatMessage, Start, Step, ToolSpec, Verdict
from fleetbus.config.load import dump_configuration, load_configuration
from fleetbus.config.run_folder import run_folder
from fleetbus.config.settings import Configuration
from fleetbus.core.training.evaluation_summary import find_interval
from fleetbus.errors import UserError
from fleetbus_schemas import Task
from fleetbus_workers.cli.program import run_program
from fleetbus_workers.environment.adapter_context import Factory
from fleetbus_workers.environment.check.quick import check_quickly
from fleetbus_workers.up.command import asks_to_restart


class Loud:
    """Prints in every call that `up` makes before it starts."""

    replayable = True
    verdict: Any = Verdict(reward=1.0)

    async def open(self, task: Task) -> None:
        print("opened")

    async def reset(self) -> Start:
        print("reset")
        return Start(messages=(ChatMessage(role="user", content="?"),))

    async def step(self, action: Action) -> Step:
        return Step(terminated=True)

    async def state(self) -> dict[str, Any]:
        return {}

    async def verify(self) -> Verdict:
        verdict: Verdict = self.verdict
        return verdict

    async def close(self) -> None:
        print("closed")


class Forgetful(Loud):
    verdict = None


class Unsure(Loud):
    verdict = Verdict(reward=None)


TASK = Task(key="one", prompt="?")


def test_a_tool_is_described_by_position_as_well() -> None:
    assert ToolSpec("find", "Find it.", {"type": "object"}) == ToolSpec(
        name="find", description="Find it.", parameters={"type": "object"}
    )


def test_what_a_class_prints_does_not_stand_between_the_lines_of_up(capsys: pytest.CaptureFixture[str]) -> None:
    check_quickly(Factory(Loud), "own:Loud", TASK, Configuration())  # type: ignore[arg-type]
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("fails", [False, True])
def test_a_class_that_changes_its_folder_does_not_move_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
    class Moving(Loud):
        verdict = None if fails else Loud.verdict

        async def open(self, task: Task) -> None:
            os.chdir("/")

    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) if fails else nullcontext():
        check_quickly(Factory(Moving), "own:Moving", TASK, Configuration())  # type: ignore[arg-type]
    assert Path.cwd() == tmp_path


@pytest.mark.parametrize(("kind", "words"), [(Forgetful, "verify returned None"), (Unsure, "gave no verdict and no reason")])
def test_a_grade_that_is_missing_is_found_in_the_first_episode(kind: type, words: str) -> None:
    with pytest.raises(UserError, match=words):
        check_quickly(Factory(kind), "own:Kind", TASK, Configuration())


def test_the_hint_of_new_names_a_run_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_program(["new", "environment", "my_game"]) == 0
    assert "train it: fleetbus up --run my_game --environment my_game:MyGame" in capsys.readouterr().out


def test_a_finished_run_that_is_told_to_restart_is_not_just_reported(tmp_path: Path) -> None:
    loaded = load_configuration(flags={"run.folder": str(tmp_path), "learner.restart_from": "10"})
    folder = run_folder(loaded.configuration.run)
    assert asks_to_restart(loaded.configuration, folder)
    folder.path.mkdir()
    folder.configuration.write_bytes(dump_configuration(load_configuration(flags={"run.folder": str(tmp_path)}).configuration))
    assert asks_to_restart(loaded.configuration, folder)
    folder.configuration.write_bytes(dump_configuration(loaded.configuration))
    assert not asks_to_restart(loaded.configuration, folder), "it was done, and is not done again"


@pytest.mark.integration
def test_a_call_that_never_returns_does_not_keep_a_stopped_worker() -> None:
    code = (
        "import threading, time\n"
        "from fleetbus_workers.cli.roles import role\n"
        "threading.Thread(target=time.sleep, args=(600,), name='given up').start()\n"
        "assert role.find_running_calls() == ['given up']\n"
        "role._exit_at_once(0)\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 0 and "still run" in ended.stdout + ended.stderr


@pytest.mark.parametrize(
    ("success", "graded", "tasks", "expected"),
    [(0.5, 100, 0, (0.404, 0.596)), (0.5, 100, 100, (0.404, 0.596)), (0.5, 100, 4, (0.150, 0.850)), (0.0, 0, 0, (0.0, 1.0))],
)
def test_an_interval_is_that_of_wilson_and_of_tasks_where_they_are_fewer(
    success: float, graded: int, tasks: int, expected: tuple[float, float]
) -> None:
    assert find_interval(success, graded, tasks) == pytest.approx(expected, abs=1e-3)
