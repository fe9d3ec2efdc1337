"""A replay from a file or a recording to its report, by one process or several."""

from __future__ import annotations

from pathlib import Path

import anyio
import anyio.to_thread

from fleetbus.recording import Recording, load_recording
from fleetbus_workers.replay.adapters import Replay, replay_here
from fleetbus_workers.replay.progress import Progress
from fleetbus_workers.replay.report import Report


async def replay_recording(source: Recording | Path, replay: Replay, progress: Progress | None = None) -> Report:
    """Replay a recording against one worker; raises `UserError` when it cannot be replayed. ``progress`` counts meanwhile."""
    began = anyio.current_time()
    report = await _replayed(source, replay, progress)
    report.seconds = anyio.current_time() - began
    return report


async def _replayed(source: Recording | Path, replay: Replay, progress: Progress | None) -> Report:
    if isinstance(source, Path):
        from fleetbus_workers.replay.shards import (  # a share's process runs that module, and imports this one
            jobs_for,
            replay_shared,
        )

        if (jobs := jobs_for(source, replay)) > 1:
            return await replay_shared(source, replay, jobs, progress)
        source = await anyio.to_thread.run_sync(load_recording, source)
    return await replay_here(source, replay, progress)
