"""The places that may keep a run's metrics: one small interface, JSON lines, TensorBoard or Weights & Biases behind it.

A sink gets flat names and finite numbers per training step and per evaluation. JSON lines keep the names; TensorBoard and W&B
get them in groups (`group_names`), because they show a section per prefix. Libraries are imported when a sink is opened; none
of them is asked for anything but to write.
"""

import math
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Protocol

import msgspec

from fleetbus.errors import UserError
from fleetbus_workers.observe.run.formatting import STAGE_PREFIX, STALENESS_PREFIX


class Sink(Protocol):
    """Blocking; called from one thread, in the order of steps."""

    def write(self, step: int, time_seconds: float, values: Mapping[str, float], evaluation: str = "") -> None:
        """Keep the values of one step, or of the ``evaluation`` of that name; ``time_seconds`` is Unix time."""

    def close(self) -> None:
        """Everything is on its way when this returns."""


def group_names(values: Mapping[str, float], evaluation: str = "") -> dict[str, float]:
    """Values under the names that dashboards group: ``train/reward``, ``time/wait``, ``staleness/max``; of an evaluation
    ``eval/success``, and ``eval_greedy/success`` if its policy was greedy."""
    if evaluation:
        prefix = "eval_greedy" if evaluation.endswith("_greedy") else "eval"
        return {f"{prefix}/{name}": value for name, value in values.items()}
    return {_group_name(name): value for name, value in values.items()}


def _group_name(name: str) -> str:
    for prefix, group in ((STAGE_PREFIX, "time"), (STALENESS_PREFIX, "staleness")):
        if name.startswith(prefix):
            return f"{group}/{name.removeprefix(prefix)}"
    return f"train/{name}"


class JsonlSink:
    """One JSON object per line: ``{"step": 3, "time": 1.7e9, "reward": 0.5}``, and with ``"evaluation": "start"`` for one of
    held-out tasks; appended and flushed line by line.

    A file that is there already is gone on with: a line that was torn is cut off, and no step is written a second time.
    """

    def __init__(self, path: Path) -> None:
        try:
            self._written = _steps_in(path)
            self._file = path.open("ab")
        except OSError as error:
            raise UserError(f"{path} cannot be written: {error.strerror}") from error
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            raise UserError(f"{path} is not a metrics file and stays unchanged: {error}") from error

    def write(self, step: int, time_seconds: float, values: Mapping[str, float], evaluation: str = "") -> None:
        line = _Line(step=step, time=time_seconds, evaluation=evaluation)
        if line in self._written:
            return
        self._written.add(line)
        named = {"evaluation": evaluation} if evaluation else {}
        try:
            self._file.write(msgspec.json.encode({"step": step, "time": time_seconds, **named, **values}) + b"\n")
            self._file.flush()
        except OSError as error:
            raise UserError(f"{self._file.name} cannot be written: {error.strerror}") from error

    def close(self) -> None:
        self._file.close()


class _Line(msgspec.Struct, frozen=True):
    """The identity of a line: a step that was trained again, by a later lineage, has another time."""

    step: int
    time: float
    evaluation: str = ""


def _steps_in(path: Path) -> set[_Line]:
    if not path.exists():
        return set()
    with path.open("r+b") as file:
        whole = file.read()
        end = whole.rfind(b"\n") + 1
        found = {msgspec.json.decode(line, type=_Line) for line in whole[:end].splitlines()}
        file.truncate(end)
    return found


class TensorBoardSink:
    """Scalars in an event file, by TensorBoard's own writer, which keeps them as 32-bit floats; needs no torch. The
    configuration is a text beside them."""

    def __init__(self, folder: Path, configuration: Mapping[str, object]) -> None:
        try:
            from tensorboard.summary import Writer  # type: ignore[import-not-found,import-untyped,unused-ignore]
        except ImportError as error:
            raise UserError("TensorBoard is not installed: pip install tensorboard") from error
        try:
            self._writer: Any = Writer(str(folder))
        except OSError as error:
            raise UserError(f"{folder} cannot be written: {error.strerror}") from error
        if configuration:
            _write_text(folder, "configuration", _format_table(configuration))

    def write(self, step: int, time_seconds: float, values: Mapping[str, float], evaluation: str = "") -> None:
        for name, value in group_names(values, evaluation).items():
            self._writer.add_scalar(name, value, step, wall_time=time_seconds)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


def _format_table(values: Mapping[str, object]) -> str:
    """A Markdown table, which TensorBoard renders."""
    return "\n".join(["| setting | value |", "|---|---|", *(f"| {name} | {value} |" for name, value in values.items())])


def _write_text(folder: Path, tag: str, text: str) -> None:
    """An event file with one text: TensorBoard's writer has scalars only."""
    from tensorboard.compat.proto.event_pb2 import Event  # type: ignore[import-not-found,import-untyped,unused-ignore]
    from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[import-not-found,import-untyped,unused-ignore]
    from tensorboard.plugins.text.metadata import create_summary_metadata  # type: ignore[import-not-found,import-untyped,unused-ignore]
    from tensorboard.summary.writer.event_file_writer import EventFileWriter  # type: ignore[import-not-found,import-untyped,unused-ignore]
    from tensorboard.util.tensor_util import make_tensor_proto  # type: ignore[import-not-found,import-untyped,unused-ignore]

    metadata = create_summary_metadata(display_name=tag, description="")
    value = Summary.Value(tag=tag, tensor=make_tensor_proto([text.encode()]), metadata=metadata)
    writer = EventFileWriter(str(folder), filename_suffix=f".{tag}")
    writer.add_event(Event(wall_time=time.time(), summary=Summary(value=[value])))
    writer.close()


class WandbSink:
    """A run of Weights & Biases, which takes its key from its own login or ``WANDB_API_KEY``.

    Steps are a value of their own, so that one that is trained again after a resume is not refused as out of order. Of the
    machine is exported: not its load, its console, its repository.
    """

    def __init__(self, project: str, *, run: str, configuration: Mapping[str, object], folder: Path | None) -> None:
        try:
            import wandb  # type: ignore[import-not-found,import-untyped,unused-ignore]
        except ImportError as error:
            raise UserError("Weights & Biases is not installed: pip install wandb") from error
        quiet = wandb.Settings(console="off", x_disable_stats=True, disable_git=True, disable_code=True)
        try:
            self._run: Any = wandb.init(
                project=project, name=run, config=dict(configuration), dir=_choose_wandb_folder(folder), settings=quiet
            )
        except wandb.Error as error:
            reason = " ".join(str(error).split())
            raise UserError(f"Weights & Biases cannot be reached: {reason} (WANDB_MODE=offline needs no account)") from error
        self._run.define_metric("*", step_metric="step")

    def write(self, step: int, time_seconds: float, values: Mapping[str, float], evaluation: str = "") -> None:
        self._run.log({**group_names(values, evaluation), "step": step, "time": time_seconds})

    def close(self) -> None:
        self._run.finish()


def _choose_wandb_folder(folder: Path | None) -> str | None:
    """The run's folder if there is one; None leaves it to W&B, which takes ``WANDB_DIR`` or the working folder."""
    return str(folder) if folder is not None and folder.is_dir() and "WANDB_DIR" not in os.environ else None


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
    *,
    run: str,
    jsonl: Path | None = None,
    tensorboard: Path | None = None,
    wandb: str = "",
    configuration: Mapping[str, Any] | None = None,
    folder: Path | None = None,
) -> Iterator[FiniteSink]:
    """The sinks that were asked for, for the length of the block; raises `UserError`. ``configuration`` are settings by name
    (``learner.steps``), without secrets; W&B keeps its files in ``folder`` if that exists."""
    with ExitStack() as stack:
        sinks: list[Sink] = []
        if jsonl is not None:
            sinks.append(JsonlSink(jsonl))
        if tensorboard is not None:
            sinks.append(TensorBoardSink(tensorboard, configuration or {}))
        if wandb:
            sinks.append(WandbSink(wandb, run=run, configuration=configuration or {}, folder=folder))
        for sink in sinks:
            stack.callback(sink.close)
        yield FiniteSink(*sinks)
