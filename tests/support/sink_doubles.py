"""Doubles of MLflow and Trackio that keep what they are told, with the signatures of mlflow 3.17.2 and trackio 0.43.0.

`tests/system/test_more_sinks.py` holds the signatures against the real packages where they are installed.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest


class MlflowException(Exception):
    pass


class Metric:
    def __init__(
        self,
        key: str,
        value: float,
        timestamp: int,
        step: int,
        model_id: str | None = None,
        dataset_name: str | None = None,
        dataset_digest: str | None = None,
        run_id: str | None = None,
    ) -> None:
        self.key, self.value, self.timestamp, self.step = key, value, timestamp, step


class Param:
    def __init__(self, key: str, value: str) -> None:
        self.key, self.value = key, value


class Tracking:
    """What an MLflow server holds. ``is_down`` makes each call fail as the client's would."""

    def __init__(self) -> None:
        self.experiments: dict[str, str] = {}
        self.runs: dict[str, Any] = {}
        self.metrics: dict[str, list[Metric]] = {}
        self.calls: list[str] = []
        self.is_down = False


def build_mlflow_client(server: Tracking) -> type:
    """The class of clients of ``server``."""

    def note(name: str) -> None:
        server.calls.append(name)
        if server.is_down:
            raise MlflowException("API request to http://me:hunter2hunter2@h/ failed:\n refused")

    class MlflowClient:
        def __init__(
            self, tracking_uri: str | None = None, registry_uri: str | None = None, workspace_store_uri: str | None = None
        ) -> None:
            pass

        def get_experiment_by_name(self, name: str) -> Any:
            note("get_experiment_by_name")
            found = server.experiments.get(name)
            return None if found is None else SimpleNamespace(experiment_id=found)

        def create_experiment(self, name: str, artifact_location: str | None = None, tags: dict[str, Any] | None = None) -> str:
            note("create_experiment")
            return server.experiments.setdefault(name, str(len(server.experiments) + 1))

        def search_runs(
            self,
            experiment_ids: list[str],
            filter_string: str = "",
            run_view_type: int = 1,
            max_results: int = 1000,
            order_by: list[str] | None = None,
            page_token: str | None = None,
        ) -> list[Any]:
            note("search_runs")
            wanted = filter_string.rpartition(" = ")[2].strip("'")
            found = [run for run in server.runs.values() if wanted == run.data.tags["fleetbus.run"]]
            return found[::-1][:max_results]

        def create_run(
            self,
            experiment_id: str,
            start_time: int | None = None,
            tags: dict[str, Any] | None = None,
            run_name: str | None = None,
        ) -> Any:
            note("create_run")
            name = f"run{len(server.runs)}"
            data = SimpleNamespace(tags=tags, params={}, metrics={})
            server.runs[name] = SimpleNamespace(info=SimpleNamespace(run_id=name, status="RUNNING"), data=data)
            server.metrics[name] = []
            return server.runs[name]

        def update_run(self, run_id: str, status: str | None = None, name: str | None = None) -> None:
            note("update_run")
            server.runs[run_id].info.status = status

        def get_metric_history(self, run_id: str, key: str) -> list[Metric]:
            note("get_metric_history")
            return [each for each in server.metrics[run_id] if each.key == key]

        def log_batch(
            self,
            run_id: str,
            metrics: Sequence[Metric] = (),
            params: Sequence[Param] = (),
            tags: Sequence[Any] = (),
            synchronous: bool | None = None,
        ) -> None:
            note("log_batch")
            data = server.runs[run_id].data
            assert len(params) <= 100 and not {each.key for each in params} & set(data.params), "parameters never change"
            data.params |= {each.key: each.value for each in params}
            data.metrics |= {each.key: each.value for each in metrics}
            server.metrics[run_id] += metrics

        def set_terminated(self, run_id: str, status: str | None = None, end_time: int | None = None) -> None:
            note("set_terminated")
            server.runs[run_id].info.status = status or "FINISHED"

    return MlflowClient


def install_mlflow(monkeypatch: pytest.MonkeyPatch) -> Tracking:
    """``import mlflow`` gives a double, whose server is returned."""
    server = Tracking()
    package, entities, exceptions = (ModuleType(name) for name in ("mlflow", "mlflow.entities", "mlflow.exceptions"))
    vars(entities).update(Metric=Metric, Param=Param)
    vars(exceptions).update(MlflowException=MlflowException)
    vars(package).update(MlflowClient=build_mlflow_client(server), entities=entities, exceptions=exceptions)
    for module in (package, entities, exceptions):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return server


class Projects:
    """What Trackio's files hold: rows by run, each with its identity, and the arguments that runs were made with."""

    def __init__(self) -> None:
        self.rows: dict[tuple[str, str, int], list[dict[str, Any]]] = {}
        self.made: list[dict[str, Any]] = []
        self.finished = 0


class TrackioRun:
    def __init__(self, projects: Projects, rows: list[dict[str, Any]]) -> None:
        self._projects, self._rows = projects, rows

    def log(self, metrics: dict[str, Any], step: int | None = None) -> None:
        assert not set(metrics) & {"project", "run", "timestamp", "step", "time", "metrics"}, "reserved"
        self._rows.append({**metrics, "step": step, "timestamp": "now"})

    def finish(self) -> None:
        self._projects.finished += 1


def install_trackio(monkeypatch: pytest.MonkeyPatch) -> Projects:
    """``import trackio`` gives a double, whose files are returned."""
    projects, numbers = Projects(), itertools.count()

    def find(project: str, name: str | None) -> list[tuple[str, str, int]]:
        return [key for key in projects.rows if key[:2] == (project, name)]

    def init(
        project: str,
        name: str | None = None,
        group: str | None = None,
        space_id: str | None = None,
        server_url: str | None = None,
        dataset_id: str | None = None,
        bucket_id: str | None = None,
        config: dict[str, Any] | None = None,
        resume: str = "never",
        settings: Any = None,
        private: bool | None = None,
        embed: bool = True,
        auto_log_gpu: bool | None = None,
        gpu_log_interval: float = 10.0,
        auto_log_cpu: bool | None = None,
        cpu_log_interval: float = 10.0,
        webhook_url: str | None = None,
        webhook_min_level: Any = None,
    ) -> TrackioRun:
        assert (embed, auto_log_gpu, auto_log_cpu) == (False, False, False), "nothing of the machine"
        projects.made.append({"project": project, "name": name, "config": config, "resume": resume})
        found = find(project, name) if resume == "allow" else []
        key = found[-1] if found else (project, name or "", next(numbers))
        return TrackioRun(projects, projects.rows.setdefault(key, []))

    class SQLiteStorage:
        @staticmethod
        def validate_project_name(project: str) -> None:
            if "/" in project:
                raise ValueError("Invalid project name")

        @staticmethod
        def get_logs(
            project: str,
            run: str | None = None,
            max_points: int | None = None,
            run_id: str | None = None,
            scalar_only: bool = False,
        ) -> list[dict[str, Any]]:
            found = find(project, run)
            return projects.rows[found[-1]] if found else []

    package, storage = ModuleType("trackio"), ModuleType("trackio.sqlite_storage")
    vars(package).update(init=init, sqlite_storage=storage)
    vars(storage).update(SQLiteStorage=SQLiteStorage)
    for module in (package, storage):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return projects
