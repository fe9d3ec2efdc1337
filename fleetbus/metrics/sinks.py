"""Where a run's metrics may be kept: one small interface, JSON lines, TensorBoard or Weights & Biases behind it.

A sink gets flat names and finite numbers per training step. Libraries are imported when a sink is opened; none of them is asked
for anything but to write.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Protocol

import msgspec

from fleetbus.errors import UserError


class Sink(Protocol):
    """Blocking; called from one thread, in the order of steps."""

    def write(self, step: int, time_seconds: float, values: Mapping[str, float]) -> None:
        """Keep the values of one step; ``time_seconds`` is Unix time."""

    def close(self) -> None:
        """Everything is on its way when this returns."""


class JsonlSink:
    """One JSON object per line: ``{"step": 3, "time": 1.7e9, "reward": 0.5}``; appended and flushed line by line."""

    def __init__(self, path: Path) -> None:
        try:
            self._file = path.open("ab")
        except OSError as error:
            raise UserError(f"{path} cannot be written: {error.strerror}") from error

    def write(self, step: int, time_seconds: float, values: Mapping[str, float]) -> None:
        self._file.write(msgspec.json.encode({"step": step, "time": time_seconds, **values}) + b"\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class TensorBoardSink:
    """Scalars in an event file, by torch's own writer."""

    def __init__(self, folder: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise UserError("TensorBoard is not installed: pip install tensorboard torch") from error
        self._writer: Any = SummaryWriter(str(folder))

    def write(self, step: int, time_seconds: float, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step, time_seconds)

    def close(self) -> None:
        self._writer.close()


class WandbSink:
    """A run of Weights & Biases, which takes its key from its own login or ``WANDB_API_KEY``."""

    def __init__(self, project: str, *, run: str) -> None:
        try:
            import wandb  # type: ignore[import-not-found,unused-ignore]
        except ImportError as error:
            raise UserError("Weights & Biases is not installed: pip install wandb") from error
        self._run: Any = wandb.init(project=project, name=run, resume="allow")

    def write(self, step: int, time_seconds: float, values: Mapping[str, float]) -> None:
        self._run.log({**values, "time": time_seconds}, step=step)

    def close(self) -> None:
        self._run.finish()


class FiniteSink:
    """Passes on what is a number; a NaN would break JSON and plots alike."""

    def __init__(self, *sinks: Sink) -> None:
        self._sinks = sinks

    def write(self, step: int, time_seconds: float, values: Mapping[str, float]) -> None:
        finite = {name: float(value) for name, value in values.items() if math.isfinite(value)}
        for sink in self._sinks:
            sink.write(step, time_seconds, finite)

    def close(self) -> None:
        """See `open_sinks`, which closes each."""


@contextmanager
def open_sinks(
    *, run: str, jsonl: Path | None = None, tensorboard: Path | None = None, wandb: str = ""
) -> Iterator[FiniteSink]:
    """The sinks that were asked for, for the length of the block; raises `UserError`."""
    with ExitStack() as stack:
        sinks: list[Sink] = []
        if jsonl is not None:
            sinks.append(JsonlSink(jsonl))
        if tensorboard is not None:
            sinks.append(TensorBoardSink(tensorboard))
        if wandb:
            sinks.append(WandbSink(wandb, run=run))
        for sink in sinks:
            stack.callback(sink.close)
        yield FiniteSink(*sinks)
