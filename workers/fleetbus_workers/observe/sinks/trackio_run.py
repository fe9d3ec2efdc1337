"""Keeps metrics in a run of Trackio."""

import os
from collections.abc import Mapping
from typing import Any

from fleetbus.errors import UserError
from fleetbus_workers.observe.sinks.base import SinkTarget, group_names

TIME = "unix_time"
"""Trackio's own ``time`` is when a value was written; this is when the step was stored."""

ELSEWHERE = ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL")


class TrackioSink:
    """A run of a Trackio project: in files under ``TRACKIO_DIR``, or at the server or Space that Trackio's own variables name.

    In files, an export that starts again goes on with the run that has the first step it is given, and writes no step a second
    time. Elsewhere it is a run of its own, as Trackio cannot ask there for what it has. Nothing of the machine is exported.
    """

    def __init__(self, project: str, target: SinkTarget) -> None:
        try:
            import trackio  # type: ignore[import-not-found,import-untyped,unused-ignore]
            from trackio.sqlite_storage import SQLiteStorage  # type: ignore[import-not-found,import-untyped,unused-ignore]
        except ImportError as error:
            raise UserError("Trackio is not installed: pip install trackio") from error
        self._trackio: Any = trackio
        self._project = project
        self._target = target
        self._run: Any = None
        self._written: set[tuple[int, float, bool]] = set()
        if any(os.environ.get(name) for name in ELSEWHERE):
            self._begin("never")
            return
        try:
            SQLiteStorage.validate_project_name(project)
            rows = SQLiteStorage.get_logs(project, target.run)
        except (ValueError, OSError) as error:
            raise _describe(error) from error
        for row in rows:
            if TIME in row:
                self._written.add((row["step"], row[TIME], any(name.startswith("eval") for name in row)))

    def write(self, step: int, time_seconds: float, values: Mapping[str, float], evaluation: str = "") -> None:
        row = (step, time_seconds, bool(evaluation))
        if self._run is None:
            self._begin("allow" if row in self._written else "never")
        if row in self._written:
            return
        self._written.add(row)
        self._run.log({**group_names(values, evaluation), TIME: time_seconds}, step=step)

    def close(self) -> None:
        if self._run is not None:
            self._run.finish()

    def _begin(self, resume: str) -> None:
        if resume == "never":
            self._written.clear()
        try:
            self._run = self._trackio.init(
                project=self._project,
                name=self._target.run,
                config=dict(self._target.configuration),
                resume=resume,
                embed=False,
                auto_log_gpu=False,
                auto_log_cpu=False,
            )
        except (ValueError, OSError) as error:
            raise _describe(error) from error


def _describe(error: Exception) -> UserError:
    from fleetbus.recording.redaction import Redactor

    return UserError(f"Trackio does not take metrics: {Redactor().clean_text(' '.join(str(error).split()))}")
