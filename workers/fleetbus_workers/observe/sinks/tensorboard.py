"""Keeps metrics as TensorBoard's event files."""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fleetbus.errors import UserError
from fleetbus_workers.observe.sinks.base import SinkTarget, group_names


class TensorBoardSink:
    """Scalars in an event file, by TensorBoard's own writer, which keeps them as 32-bit floats; needs no torch. The
    configuration is a text beside them."""

    def __init__(self, folder: Path, target: SinkTarget) -> None:
        try:
            from tensorboard.summary import Writer  # type: ignore[import-not-found,import-untyped,unused-ignore]
        except ImportError as error:
            raise UserError("TensorBoard is not installed: pip install tensorboard") from error
        try:
            self._writer: Any = Writer(str(folder))
        except OSError as error:
            raise UserError(f"{folder} cannot be written: {error.strerror}") from error
        if target.configuration:
            _write_text(folder, "configuration", _format_table(target.configuration))

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
