"""Every sink, one row each: the flags of `fleetbus metrics` and what opens them are read from here."""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple

from fleetbus_workers.observe.sinks.base import Sink, SinkTarget
from fleetbus_workers.observe.sinks.json_lines import JsonlSink
from fleetbus_workers.observe.sinks.mlflow_run import MlflowSink
from fleetbus_workers.observe.sinks.tensorboard import TensorBoardSink
from fleetbus_workers.observe.sinks.trackio_run import TrackioSink
from fleetbus_workers.observe.sinks.weights_and_biases import WandbSink


class SinkKind(NamedTuple):
    """One kind of sink: ``--name`` takes a file, a folder or a text called ``metavar``, with which ``make`` opens it."""

    name: str
    takes: Literal["file", "folder", "text"]
    metavar: str | None
    help: str
    make: Callable[[Any, SinkTarget], Sink]


SINKS = (
    SinkKind("jsonl", "file", None, "Append a JSON object per training step", JsonlSink),
    SinkKind("tensorboard", "folder", None, "Write TensorBoard scalars per step", TensorBoardSink),
    SinkKind("wandb", "text", "PROJECT", "Log to a Weights & Biases project per step", WandbSink),
    SinkKind("mlflow", "text", "EXPERIMENT", "Log to an MLflow experiment per step", MlflowSink),
    SinkKind("trackio", "text", "PROJECT", "Log to a Trackio project per step", TrackioSink),
)


class FiniteSink:
    """Passes on what is a number; a NaN would break JSON and plots alike."""

    def __init__(self, *sinks: Sink) -> None:
        self._sinks = sinks

    def write(self, step: int, time_seconds: float, values: Mapping[str, float], evaluation: str = "") -> None:
        finite = {name: float(value) for name, value in values.items() if math.isfinite(value)}
        for sink in self._sinks:
            sink.write(step, time_seconds, finite, evaluation)

    def close(self) -> None:
        """See `open_sinks`, which closes each."""


@contextmanager
def open_sinks(
    *, run: str, configuration: Mapping[str, Any] | None = None, folder: Path | None = None, **wanted: Any
) -> Iterator[FiniteSink]:
    """The sinks that were ``wanted`` by name, for the length of the block; raises `UserError`. The others are those of
    `SinkTarget`."""
    target = SinkTarget(run=run, configuration=configuration or {}, folder=folder)
    with ExitStack() as stack:
        sinks = [stack.enter_context(closing(kind.make(wanted[kind.name], target))) for kind in SINKS if wanted.get(kind.name)]
        yield FiniteSink(*sinks)
