"""``fleetbus tasks import``: the tasks of an environment of another package become a tasks file."""

from __future__ import annotations

import sys
from pathlib import Path

from click.testing import CliRunner

from fleetbus.tasks.files import load_dataset
from fleetbus_workers.cli.setup.tasks import command

GUESS = Path(__file__).parent / "stand_in" / "guess"
SPEC = f"verifiers+python={sys.executable}:{GUESS}"


def run(*words: str) -> tuple[int, str]:
    done = CliRunner().invoke(command, ["import", *words])
    return done.exit_code, f"{done.output}{done.exception or ''}"


def test_tasks_of_another_package_become_a_tasks_file(tmp_path: Path) -> None:
    file = tmp_path / "tasks.json"
    assert run(SPEC, "--count", "3", "--output", str(file), "--env", "guess") == (0, f"wrote 3 tasks to {file}\n")
    tasks = load_dataset(str(file))
    assert [(task.key, task.env, task.prompt, task.config) for task in tasks[:2]] == [
        ("guess-0", "guess", "Say alpha.", {"index": 0}),
        ("guess-1", "guess", "Say bravo.", {"index": 1}),
    ]


def test_a_package_that_cannot_be_loaded_is_said_in_its_own_words(tmp_path: Path) -> None:
    status, said = run(f"{SPEC} 'broken=no data here'", "--output", str(tmp_path / "tasks.json"))
    assert status and "cannot be loaded: ValueError: no data here" in said
