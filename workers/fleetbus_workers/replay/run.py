"""Replays a file or a recording, in this process or in several."""

from __future__ import annotations

from pathlib import Path

import anyio
import anyio.to_thread

from fleetbus.recording import Recording, load_recording
from fleetbus_workers.replay.one_process import replay_here
from fleetbus_workers.replay.options import Replay
from fleetbus_workers.replay.progress import Progress
from fleetbus_workers.replay.report import Report
from fleetbus_workers.replay.shards import count_jobs, replay_shared


async def replay_recording(source: Recording | Path, replay: Replay, progress: Progress | None = None) -> Report:
    """Replay a recording against one worker; raises `UserError` when it cannot be replayed. ``progress`` counts meanwhile."""
    began = anyio.current_time()
    progress = progress or Progress()
    if isinstance(source, Path) and (jobs := count_jobs(source, replay)) > 1:
        report = await replay_shared(source, replay, jobs, progress)
    else:
        recording = await anyio.to_thread.run_sync(load_recording, source) if isinstance(source, Path) else source
        report = await replay_here(recording, replay, progress)
    report.seconds = anyio.current_time() - began
    return report
