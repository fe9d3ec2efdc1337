"""Keeps metrics as JSON lines in a file."""

from collections.abc import Mapping
from pathlib import Path

import msgspec

from fleetbus.errors import UserError
from fleetbus_schemas.message import UNREADABLE
from fleetbus_workers.observe.sinks.base import SinkTarget


class JsonlSink:
    """One JSON object per line: ``{"step": 3, "time": 1.7e9, "reward": 0.5}``, and with ``"evaluation": "start"`` for one of
    held-out tasks; appended and flushed line by line.

    A file that is there already is gone on with: a line that was torn is cut off, and no step is written a second time.
    """

    def __init__(self, path: Path, _target: SinkTarget) -> None:
        try:
            self._written = _steps_in(path)
            self._file = path.open("ab")
        except OSError as error:
            raise UserError(f"{path} cannot be written: {error.strerror}") from error
        except UNREADABLE as error:
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
