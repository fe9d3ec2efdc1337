"""Keeps metrics in a run of MLflow."""

import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

from fleetbus.errors import UserError
from fleetbus_workers.observe.sinks.base import SinkTarget, group_names

T = TypeVar("T")

RUN_TAG = "fleetbus.run"
RETRIES = "MLFLOW_HTTP_REQUEST_MAX_RETRIES"
MAX_PARAMETERS = 100
"""As many as MLflow takes at once."""

MAX_PARAMETER_CHARACTERS = 6000
MAX_REASON_CHARACTERS = 300
_NOT_IN_NAMES = re.compile(r"[^\w.\- :/]")


class MlflowSink:
    """A run of an experiment at ``MLFLOW_TRACKING_URI``, whose user, password or token come from MLflow's own variables.

    An export that starts again goes on with the run that has the first value it is given, and writes no value a second time:
    MLflow keeps the time of each. The configuration are its parameters, of which MLflow keeps the first value. MLflow's own
    telemetry is turned off unless ``MLFLOW_DISABLE_TELEMETRY`` says otherwise.
    """

    def __init__(self, experiment: str, target: SinkTarget) -> None:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        try:
            import mlflow  # type: ignore[import-not-found,import-untyped,unused-ignore]
            from mlflow import entities  # type: ignore[import-not-found,import-untyped,unused-ignore]
            from mlflow.exceptions import MlflowException  # type: ignore[import-not-found,import-untyped,unused-ignore]
        except ImportError as error:
            raise UserError("MLflow is not installed: pip install mlflow") from error
        self._entities: Any = entities
        self._error: type[Exception] = MlflowException
        self._target = target
        self._run_id = ""
        self._written: set[tuple[str, int, int]] = set()
        """Values that an export before has written: no more than these can come a second time."""
        with _few_retries():
            self._client: Any = self._call(mlflow.MlflowClient)
            self._experiment: str = self._call(lambda: self._find_experiment(experiment))
            self._earlier = self._call(self._find_earlier_run)

    def write(self, step: int, time_seconds: float, values: Mapping[str, float], evaluation: str = "") -> None:
        at = round(time_seconds * 1000)
        named = {_NOT_IN_NAMES.sub("_", name): value for name, value in group_names(values, evaluation).items()}
        self._call(lambda: self._write(step, at, named))

    def close(self) -> None:
        if self._run_id:
            self._call(lambda: self._client.set_terminated(self._run_id))

    def _write(self, step: int, at: int, values: Mapping[str, float]) -> None:
        if not self._run_id:
            self._begin(step, at)
        new = {name: value for name, value in values.items() if (name, step, at) not in self._written}
        if new:
            metrics = [self._entities.Metric(key=name, value=value, timestamp=at, step=step) for name, value in new.items()]
            self._client.log_batch(self._run_id, metrics=metrics, synchronous=True)

    def _find_experiment(self, name: str) -> str:
        found = self._client.get_experiment_by_name(name)
        return str(self._client.create_experiment(name) if found is None else found.experiment_id)

    def _find_earlier_run(self) -> Any:
        """The newest run of this name, or None; what it has is then written."""
        name = self._target.run.replace("'", "")
        wanted = f"tags.`{RUN_TAG}` = '{name}'"
        found = self._client.search_runs(
            [self._experiment], filter_string=wanted, max_results=1, order_by=["attributes.start_time DESC"]
        )
        for run in found:
            for key in run.data.metrics:
                history = self._client.get_metric_history(run.info.run_id, key)
                self._written |= {(key, each.step, each.timestamp) for each in history}
            return run
        return None

    def _begin(self, step: int, at: int) -> None:
        """Go on with the run that has this step of this time; a run of the same name that has not is another one."""
        earlier = self._earlier
        if earlier is not None and (step, at) in {(number, when) for _, number, when in self._written}:
            self._run_id = earlier.info.run_id
            self._client.update_run(self._run_id, status="RUNNING")
            self._write_parameters(without=earlier.data.params)
            return
        self._written.clear()
        name = self._target.run
        made = self._client.create_run(
            self._experiment, start_time=round(time.time() * 1000), tags={RUN_TAG: name.replace("'", "")}, run_name=name
        )
        self._run_id = made.info.run_id
        self._write_parameters(without={})

    def _write_parameters(self, *, without: Mapping[str, str]) -> None:
        named = {_NOT_IN_NAMES.sub("_", name): str(value) for name, value in self._target.configuration.items()}
        parameters = [
            self._entities.Param(name, value[:MAX_PARAMETER_CHARACTERS]) for name, value in named.items() if name not in without
        ]
        for first in range(0, len(parameters), MAX_PARAMETERS):
            self._client.log_batch(self._run_id, params=parameters[first : first + MAX_PARAMETERS], synchronous=True)

    def _call(self, function: Callable[[], T]) -> T:
        try:
            return function()
        except (self._error, OSError) as error:
            from fleetbus.recording.redaction import Redactor

            reason = Redactor().clean_text(" ".join(str(error).split()))[:MAX_REASON_CHARACTERS]
            raise UserError(f"MLflow does not take metrics: {reason} (MLFLOW_TRACKING_URI names its server)") from error


@contextmanager
def _few_retries() -> Iterator[None]:
    """A server that is not there is said at once; later, while metrics come, MLflow tries for minutes."""
    is_set = RETRIES in os.environ
    os.environ.setdefault(RETRIES, "1")
    try:
        yield
    finally:
        if not is_set:
            del os.environ[RETRIES]
