"""The sinks of MLflow and Trackio against doubles with the real signatures: what is kept, once, and what a failure says."""

from __future__ import annotations

import os
from typing import Any

import pytest

from fleetbus.errors import UserError
from fleetbus_workers.observe.sinks.table import open_sinks
from tests.support.sink_doubles import install_mlflow, install_trackio

CONFIGURATION = {"learner.steps": 9, "run.name": "r", **{f"filler.{number}": number for number in range(150)}}


def export(steps: list[tuple[int, float]], *, evaluations: int = 1, configuration: Any = CONFIGURATION, **where: Any) -> None:
    """As `fleetbus metrics` does: steps from the first on, then evaluations."""
    with open_sinks(run="r", configuration=configuration, **where) as sinks:
        for step, seconds in steps:
            sinks.write(step, seconds, {"reward": step / 3, "seconds_wait": 2.0, "kl": float("nan"), "tool/a+b": 1.0})
        for number in range(evaluations):
            sinks.write(0, 99.5 + number, {"success": 0.25}, "start_greedy")


FIRST = [(1, 100.001), (2, 101.25)]
GROWN = [*FIRST, (3, 102.5), (2, 103.0)]
"""Step 2 is trained again, by a later lineage."""


def test_mlflow_gets_each_value_once_and_an_export_that_starts_again_goes_on_with_its_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server = install_mlflow(monkeypatch)
    export(FIRST, mlflow="e")
    export(GROWN, configuration={**CONFIGURATION, "learner.steps": 12, "learner.new": True}, mlflow="e")
    ((name, run),) = server.runs.items()
    assert (run.data.tags, run.info.status) == ({"fleetbus.run": "r"}, "FINISHED") and server.experiments == {"e": "1"}
    rewards = [(each.step, each.timestamp, each.value) for each in server.metrics[name] if each.key == "train/reward"]
    assert rewards == [(step, round(seconds * 1000), step / 3) for step, seconds in GROWN]
    assert {each.key for each in server.metrics[name]} == {
        "train/reward", "time/wait", "train/tool/a_b", "eval_greedy/success",
    }  # fmt: skip
    assert len([each for each in server.metrics[name] if each.key == "eval_greedy/success"]) == 1
    assert len(run.data.params) == 153 and (run.data.params["learner.steps"], run.data.params["learner.new"]) == ("9", "True")


def test_another_training_of_the_same_name_is_another_run_of_mlflow(monkeypatch: pytest.MonkeyPatch) -> None:
    server = install_mlflow(monkeypatch)
    export(FIRST, mlflow="e")
    export([(1, 500.0)], mlflow="e")
    export([(1, 500.0), (2, 501.0)], mlflow="e")
    assert [len({each.step for each in kept if each.key == "train/reward"}) for kept in server.metrics.values()] == [2, 2]


def test_an_mlflow_server_that_fails_is_one_line_without_its_password(monkeypatch: pytest.MonkeyPatch) -> None:
    server = install_mlflow(monkeypatch)
    monkeypatch.delenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", raising=False)
    server.is_down = True
    with pytest.raises(UserError, match="MLflow does not take metrics: API request") as raised:
        export(FIRST, mlflow="e")
    assert "\n" not in str(raised.value) and "hunter2" not in str(raised.value)
    assert "MLFLOW_HTTP_REQUEST_MAX_RETRIES" not in os.environ
    server.is_down = False
    with open_sinks(run="r", mlflow="e") as sinks:
        server.is_down = True
        with pytest.raises(UserError, match="MLflow does not take metrics"):
            sinks.write(1, 1.0, {"reward": 1.0})
        server.is_down = False


def test_trackio_gets_each_step_once_and_an_export_that_starts_again_goes_on_with_its_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    projects = install_trackio(monkeypatch)
    export(FIRST, trackio="p")
    export(GROWN, trackio="p")
    (rows,) = projects.rows.values()
    assert [(row["step"], row["unix_time"], row["train/reward"]) for row in rows if "train/reward" in row] == [
        (step, seconds, step / 3) for step, seconds in GROWN
    ]
    assert [row for row in rows if "eval_greedy/success" in row] == [
        {"eval_greedy/success": 0.25, "unix_time": 99.5, "step": 0, "timestamp": "now"}
    ]
    assert [(made["resume"], made["config"]["learner.steps"]) for made in projects.made] == [("never", 9), ("allow", 9)]
    assert projects.finished == 2
    export([(1, 500.0)], trackio="p")
    assert len(projects.rows) == 2, "another training of the same name"


def test_trackio_elsewhere_is_a_run_of_its_own_at_each_start(monkeypatch: pytest.MonkeyPatch) -> None:
    projects = install_trackio(monkeypatch)
    monkeypatch.setenv("TRACKIO_SERVER_URL", "http://h:1")
    export(FIRST, trackio="p")
    export(FIRST, trackio="p")
    assert [len(rows) for rows in projects.rows.values()] == [3, 3]


def test_a_name_that_trackio_refuses_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    install_trackio(monkeypatch)
    with pytest.raises(UserError, match="Trackio does not take metrics: Invalid project name"):
        export(FIRST, trackio="a/b")
