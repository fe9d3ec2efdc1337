"""Paths and addresses that `fleetbus up` hands to its roles: paths absolute, URLs as they are, no password in a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fleetbus.config.load import dump_configuration
from fleetbus.config.run_folder import run_folder
from fleetbus.config.settings import Configuration, RunSettings
from fleetbus_workers.up.command import format_opening_line, resolve_paths
from fleetbus_workers.up.identity import build_identity
from fleetbus_workers.up.process_plans import build_role_variables

URL = "https://ada:s3cret@host/tasks.json@v0.2"


def configured(tasks: str) -> Configuration:
    return resolve_paths(Configuration(run=RunSettings(tasks=tasks, model="m")))


@pytest.mark.parametrize("url", [URL, "s3://bucket/{version}/tasks.json@v0.2"])
def test_tasks_at_a_url_stay_where_they_are(url: str) -> None:
    assert configured(url).run.tasks == url


def test_paths_are_for_processes_in_any_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    run = configured("data@v0.2").run
    assert (run.tasks, run.model) == (str(tmp_path / "data@v0.2"), str(tmp_path / "m"))


def test_the_password_of_a_tasks_url_reaches_the_roles_and_no_file() -> None:
    configuration = configured(URL)
    assert build_role_variables(configuration, "nats://h", {}, 1)["FLEETBUS_RUN_TASKS"] == URL
    assert b"s3cret" not in dump_configuration(configuration)
    assert "s3cret" not in str(build_identity(configuration))


def test_every_command_looks_for_a_run_below_the_users_home_where_up_put_it() -> None:
    configuration = Configuration(run=RunSettings(folder="~/runs"))
    assert run_folder(configuration.run).path == run_folder(resolve_paths(configuration).run).path


def test_the_opening_line_says_whose_tasks_an_environment_of_another_kind_gets(tmp_path: Path) -> None:
    def opening(**run: Any) -> str:
        configuration = Configuration(run=RunSettings(folder=str(tmp_path), **run))
        return format_opening_line(configuration, run_folder(configuration.run))

    assert "on gym:Taxi with the warehouse tasks (yours: --tasks FILE)," in opening(environment="gym:Taxi")
    assert "warehouse tasks" not in opening(environment="gym:Taxi", tasks="tasks.json") + opening()
