"""`fleetbus tasks` and `fleetbus new` as a user types them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fleetbus.tasks.files import dump_tasks, load_tasks
from fleetbus_schemas import Task
from fleetbus_workers.cli.program import run_program

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[2]


@pytest.fixture
def tasks_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    tasks = [
        Task(key=f"{env}-{index}", prompt="p", env=env) for env, count in (("a", 20), ("b", 300)) for index in range(count)
    ]
    tasks += [Task(key=f"s-{index}", prompt="p", env="instacart", modality="computer_use") for index in range(4)]
    tasks += [Task(key="hard", prompt="p", env="c", config={"difficulty": 3}, verifier="def verify(env): return 1")]
    dump_tasks(tasks, tmp_path / "tasks.json")
    return tmp_path / "tasks.json"


def run_and_read(capsys: pytest.CaptureFixture[str], *arguments: str, status: int = 0) -> Any:
    assert run_program([*arguments, "--json"]) == status
    return json.loads(capsys.readouterr().out)


def test_valid_tasks_are_counted(tasks_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    facts = run_and_read(capsys, "tasks", "validate", str(tasks_file))
    assert facts["environments"] == {"a": 20, "b": 300, "c": 1, "instacart": 4}
    assert (facts["tasks"], facts["without_verifier"], facts["problems"]) == (325, 324, [])
    assert run_program(["tasks", "validate", "tasks.json"]) == 0
    assert "tasks.json: valid, 325 tasks, version sha256:" in capsys.readouterr().out


def test_all_that_is_wrong_is_said_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "t.json"
    file.write_text(json.dumps([{"key": "a"}, {"key": "b", "prompt": "p", "verifier_code": "def ("}, {"prompt": "p"}]))
    assert run_program(["tasks", "validate", str(file)]) == 2
    shown = capsys.readouterr()
    assert [line.split(": ", 1)[1][:40] for line in shown.err.splitlines()] == [
        f"{file}: task 1 (a) has no prompt; add"[:40],
        f"{file}: task 3 has no key; add"[:40],
        "task b: its verifier is no Python: inval"[:40],
    ]
    assert "3 problems" in shown.out


def test_a_verifier_that_can_be_forged_is_warned_of_and_still_valid(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = "def verify(env, final_answer):\n    exec(final_answer)\n    return 1"
    dump_tasks([Task(key="a", prompt="p", verifier=code)], tmp_path / "t.json")
    (warning,) = run_and_read(capsys, "tasks", "validate", str(tmp_path / "t.json"))["warnings"]
    assert warning.startswith("task a, its verifier: line 2: runs code in the grader's own process")
    assert run_program(["tasks", "validate", str(tmp_path / "t.json")]) == 0
    assert f"warning: {warning}" in capsys.readouterr().err


def test_environments_that_serve_not_every_task_are_a_problem(tasks_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("tasks", "validate", str(tasks_file), "--environment", "a=scripted", "--environment", "b=scripted")
    (problem,) = run_and_read(capsys, *arguments, status=2)["problems"]
    assert "no environment for the key 'c', 'instacart'" in problem
    run_and_read(capsys, *arguments, "--environment", "scripted")


def test_a_split_has_the_defaults_of_the_data_preparation(tasks_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    facts = run_and_read(capsys, "tasks", "split", str(tasks_file), "--output", "out")
    assert facts["environments"] == {
        "a": {"train": 18, "validation": 2},
        "b": {"train": 270, "validation": 30},
        "c": {"train": 1, "validation": 0},
        "instacart": {"train": 0, "validation": 4},
    }
    assert facts["dataset_version"].startswith("sha256:")
    assert len(load_tasks("out/train.json")) == 289
    assert {task.env for task in load_tasks("out/validation.json")} == {"a", "b", "instacart"}
    again = run_and_read(capsys, "tasks", "split", str(tasks_file), "--output", "again")
    assert (tasks_file.parent / "again/train.json").read_bytes() == (tasks_file.parent / "out/train.json").read_bytes()
    assert again["environments"] == facts["environments"]


def test_a_split_takes_the_parameters_of_the_other_data_preparation(
    tasks_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rules = ["--eval-ratio", "0.2", "--max-eval", "20", "--min-eval", "5", "--all-or-none", "--max-eval-total", "96"]
    facts = run_and_read(capsys, "tasks", "split", str(tasks_file), *rules, "--hold-out", "c", "--modality", "tool_use")
    assert facts["environments"] == {
        "a": {"train": 20, "validation": 0},
        "b": {"train": 280, "validation": 20},
        "c": {"train": 0, "validation": 1},
    }
    hard = run_and_read(capsys, "tasks", "split", str(tasks_file), "--difficulty", "3", "--env", "c")
    assert (hard["train"], hard["validation"]) == (1, 0)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["validate", "absent.json"], "there is no such file"),
        (["split", "tasks.json", "--env", "none"], "no task is left to split"),
        (["split", "tasks.json", "--max-env-share", "0"], "0.0 is not in the range 0<x<=1"),
        (["split", "tasks.json", "--eval-ratio", "2"], "--eval-ratio"),
        (["split", "tasks.json", "--output", "tasks.json/x"], "choose another folder with --output"),
    ],
)
def test_a_mistake_gets_one_line_and_the_status_of_bad_input(
    tasks_file: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    assert run_program(["tasks", *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert words in line


def test_a_split_into_parquet_without_its_package_writes_nothing(
    tasks_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert run_program(["tasks", "split", str(tasks_file), "--output", "halves", "--format", "both"]) == 2
    assert capsys.readouterr().err.startswith("fleetbus: halves: Parquet needs pyarrow: pip install")
    assert not (tasks_file.parent / "halves").exists()


@pytest.mark.parametrize("flags", [[], ["--sync"]])
def test_a_new_environment_is_short_and_passes_its_own_test(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str]
) -> None:
    assert run_program(["new", "environment", "my_game", "--folder", str(tmp_path), *flags]) == 0
    printed = capsys.readouterr().out
    assert f"cd {tmp_path} && fleetbus up --run my_game --environment my_game:MyGame --tasks my_game_tasks.json" in printed
    source = (tmp_path / "my_game.py").read_text()
    assert len(source.splitlines()) <= 60
    assert ("async def step" in source) is not flags
    assert len(load_tasks(tmp_path / "my_game_tasks.json")) == 40
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_my_game.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 passed" in done.stdout


@pytest.mark.parametrize("name", ["My-Game", "class", "../x", "2fast", "x" * 300])
def test_a_name_that_is_no_module_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    assert run_program(["new", "environment", name, "--folder", str(tmp_path)]) == 2
    assert "is not a module name" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_what_could_not_be_written_whole_is_not_written_in_part(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "test_my_game.py").symlink_to(tmp_path / "nowhere" / "file")
    assert run_program(["new", "environment", "my_game", "--folder", str(tmp_path)]) == 2
    assert "cannot be written to" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["test_my_game.py"]


@pytest.mark.parametrize("name", ["json", "random", "fleetbus_schemas", "anyio"])
def test_a_name_that_would_hide_another_module_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    assert run_program(["new", "environment", name, "--folder", str(tmp_path)]) == 2
    assert f"already has a module {name}" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_nothing_that_exists_is_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "test_mine.py").write_text("precious")
    assert run_program(["new", "environment", "mine", "--folder", str(tmp_path)]) == 2
    assert "already exists" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["test_mine.py"]
