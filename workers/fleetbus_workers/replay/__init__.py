"""Recorded inputs fed to one real worker on the in-memory bus, and what it publishes compared with what was recorded."""

from fleetbus_workers.replay.options import Replay
from fleetbus_workers.replay.report import Difference, Report
from fleetbus_workers.replay.run import replay_recording

__all__ = ["Difference", "Replay", "Report", "replay_recording"]
