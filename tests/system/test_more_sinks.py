"""MLflow and Trackio, the real packages, hold the steps of a run once, also after an exporter was killed: `just test-sinks`."""

from __future__ import annotations

import inspect
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from fleetbus.errors import UserError
from fleetbus_workers.observe.sinks.table import open_sinks
from tests.support.sink_doubles import Metric, Tracking, build_mlflow_client, install_trackio

pytestmark = [pytest.mark.filterwarnings("default"), pytest.mark.timeout(400)]

ROOT = Path(__file__).parents[2]
CONFIGURATION = {"learner.steps": 9, "run.name": "r", "empty": "", "none": None, **{f"f.{n}": n for n in range(150)}}
STEPS = [(1, 1_700_000_000.123), (2, 1_700_000_001.5), (3, 1_700_000_002.25), (2, 1_700_000_003.75)]
"""Step 2 is trained again, by a later lineage."""


def export(until: int, configuration: Mapping[str, Any] = CONFIGURATION, **where: str) -> None:
    wanted: Any = where
    with open_sinks(run="r", configuration=configuration, **wanted) as sinks:
        for step, seconds in STEPS[:until]:
            sinks.write(step, seconds, {"reward": step / 3, "seconds_wait": 2.0, "kl": float("nan"), "tool/a+b": 1.0})
        sinks.write(0, STEPS[0][1], {"success": 0.25}, "start")


def kill_exporter(after: int, where: str, name: str, folder: Path, ready: str) -> None:
    """An exporter that is killed once it wrote ``after`` steps and ``ready``, an expression, is true."""
    code = (
        "import os, signal, time\n"
        "from fleetbus_workers.observe.sinks.table import open_sinks\n"
        "from tests.system.test_more_sinks import CONFIGURATION, STEPS\n"
        f"sinks = open_sinks(run='r', configuration=CONFIGURATION, {where}={name!r})\n"
        "kept = sinks.__enter__()\n"
        f"for step, seconds in STEPS[:{after}]:\n"
        "    kept.write(step, seconds, {'reward': step / 3, 'seconds_wait': 2.0, 'tool/a+b': 1.0})\n"
        f"while not ({ready}): time.sleep(0.05)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", code]
    ended = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == -signal.SIGKILL, ended.stderr


def test_mlflow_has_each_step_once_after_an_exporter_was_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    pytest.importorskip("sqlalchemy", reason="mlflow-skinny has no store of its own")
    address = f"sqlite:///{tmp_path / 'mlflow.db'}"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", address)
    kill_exporter(2, "mlflow", "an experiment", tmp_path, "True")
    export(3, {**CONFIGURATION, "learner.steps": 12, "new": 1}, mlflow="an experiment")
    export(4, mlflow="an experiment")
    client = mlflow.MlflowClient(address)
    experiment = client.get_experiment_by_name("an experiment").experiment_id
    (run,) = client.search_runs([experiment])
    assert (run.info.run_name, run.info.status, run.data.tags["fleetbus.run"]) == ("r", "FINISHED", "r")
    for name, factor in (("train/reward", 1 / 3), ("train/tool/a_b", 0)):
        history = sorted(client.get_metric_history(run.info.run_id, name), key=lambda each: int(each.timestamp))
        wanted = [(step, round(seconds * 1000), step * factor or 1.0) for step, seconds in STEPS]
        assert [(each.step, each.timestamp, each.value) for each in history] == wanted
    assert set(run.data.metrics) == {"train/reward", "time/wait", "train/tool/a_b", "eval/success"}
    assert len(client.get_metric_history(run.info.run_id, "eval/success")) == 1
    parameters = run.data.params
    assert (parameters["learner.steps"], parameters["empty"], parameters["none"], parameters["new"]) == ("9", "", "None", "1")
    assert len(parameters) == len(CONFIGURATION) + 1


def test_an_mlflow_server_that_is_not_there_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://me:hunter2hunter2@127.0.0.1:1")
    with pytest.raises(UserError, match="MLflow does not take metrics") as raised:
        export(1, mlflow="e")
    assert "\n" not in str(raised.value) and "hunter2" not in str(raised.value)


def test_trackio_has_each_step_once_after_an_exporter_was_killed(tmp_path: Path) -> None:
    """In processes of their own: Trackio reads its folder when it is imported."""
    pytest.importorskip("trackio")
    environment = os.environ | {"TRACKIO_DIR": str(tmp_path / "files"), "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("TRACKIO_DIR", environment["TRACKIO_DIR"])
        patched.setenv("HF_HUB_OFFLINE", "1")
        two = "len(__import__('trackio').sqlite_storage.SQLiteStorage.get_logs('a-project', 'r')) == 2"
        kill_exporter(2, "trackio", "a-project", tmp_path, two)
    code = (
        "import json\n"
        "from tests.system.test_more_sinks import export\n"
        "export(3, trackio='a-project')\n"
        "export(4, trackio='a-project')\n"
        "import trackio\n"
        "from trackio.sqlite_storage import SQLiteStorage as Storage\n"
        "(run,) = trackio.Api().runs('a-project')\n"
        "rows = Storage.get_logs('a-project', 'r')\n"
        "print(json.dumps([rows, run.config, len(Storage.get_system_logs('a-project', 'r'))], default=str))\n"
    )
    command = [sys.executable, "-c", code]
    ended = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 0, ended.stderr
    rows, configuration, of_the_machine = json.loads(next(line for line in ended.stdout.splitlines() if line.startswith("[[")))
    steps = sorted((row["unix_time"], row["step"], row["train/reward"]) for row in rows if "train/reward" in row)
    assert steps == [(seconds, step, step / 3) for step, seconds in STEPS]
    assert [row["eval/success"] for row in rows if "eval/success" in row] == [0.25]
    assert (configuration["learner.steps"], of_the_machine) == (9, 0)


def list_parameters(function: Any) -> list[tuple[str, object, bool]]:
    """Names, kinds and if there is a default; annotations and the defaults themselves are the package's."""
    found = inspect.signature(function).parameters.values()
    return [(each.name, each.kind, each.default is not inspect.Parameter.empty) for each in found]


def test_the_double_of_mlflow_has_the_signatures_of_the_real_package() -> None:
    mlflow = pytest.importorskip("mlflow")
    from mlflow.entities import Metric as RealMetric

    double = build_mlflow_client(Tracking())
    for name, function in vars(double).items():
        if callable(function):
            assert list_parameters(function) == list_parameters(getattr(mlflow.MlflowClient, name)), name
    assert list_parameters(Metric.__init__) == list_parameters(RealMetric.__init__)


def test_the_double_of_trackio_has_the_signatures_of_the_real_package(monkeypatch: pytest.MonkeyPatch) -> None:
    trackio = pytest.importorskip("trackio")
    storage: Any = pytest.importorskip("trackio.sqlite_storage").SQLiteStorage
    real = {"init": trackio.init, "get_logs": storage.get_logs, "validate": storage.validate_project_name}
    install_trackio(monkeypatch)
    double: Any = sys.modules["trackio"]
    doubles = double.sqlite_storage.SQLiteStorage
    twins = {"init": double.init, "get_logs": doubles.get_logs, "validate": doubles.validate_project_name}
    assert {name: list_parameters(each) for name, each in twins.items()} == {
        name: list_parameters(each) for name, each in real.items()
    }
