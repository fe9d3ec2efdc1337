"""Curves of other runs, to be drawn beside those of the one that is shown: from the summaries in the folder of the runs."""

from __future__ import annotations

from pathlib import Path

import msgspec

from fleetbus.config.run_folder import RunFolder
from fleetbus_schemas.message import UNREADABLE

MAX_BYTES = 64 << 20


class OtherRun(msgspec.Struct, frozen=True, kw_only=True):
    """The summary that `up` wrote into ``summary.json`` when it ended last: reward and success of each of ``steps``; success on
    held-out tasks before and after; seconds that it ran."""

    run: str
    steps: list[int]
    reward_by_step: list[float | None]
    success_by_step: list[float | None]
    success_start: float | None = None
    success_end: float | None = None
    wall_seconds: float | None = None
    finished: bool = False


def list_other_runs(folder: Path, run: str) -> list[str]:
    """The runs in a folder, but ``run``, that have a summary."""
    if not folder.is_dir():
        return []
    return sorted(path.name for path in folder.iterdir() if path.name != run and RunFolder(path).summary.is_file())


def read_other_run(folder: Path, run: str) -> OtherRun | None:
    """The curves of a run; None if there are none, or none that can be read."""
    file = RunFolder(folder / run).summary
    try:
        if file.stat().st_size > MAX_BYTES:
            return None
        return msgspec.json.decode(file.read_bytes(), type=OtherRun)
    except (OSError, *UNREADABLE):
        return None
