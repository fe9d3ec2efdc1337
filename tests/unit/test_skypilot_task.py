"""The task for SkyPilot fits the command line and the settings; where SkyPilot is installed, it takes the task, too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fleetbus.config.load import load_configuration
from tests.support.command_lines import parse_command_line

yaml = pytest.importorskip("yaml")

FILE = Path(__file__).parents[2] / "deploy" / "skypilot" / "environment.yaml"


def test_its_command_exists_and_its_variables_are_settings() -> None:
    task: dict[str, Any] = yaml.safe_load(FILE.read_text())
    program, *arguments = task["run"].split()[1:]
    assert program.endswith("/bin/fleetbus") and parse_command_line(arguments) == "environment"
    configuration = load_configuration(variables=task["envs"]).configuration
    assert configuration.nats.auth in task["file_mounts"] and configuration.limits.drain < 30
    assert task["resources"]["use_spot"]


def test_skypilot_takes_the_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sky = pytest.importorskip("sky")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "keys" / "environment").mkdir(parents=True)
    task = sky.Task.from_yaml(str(FILE))
    (resources,) = task.resources
    assert resources.use_spot and task.envs["FLEETBUS_RUN_NAME"] == "default"
