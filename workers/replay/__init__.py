"""Recorded inputs fed to one real worker on the in-memory bus, and what it publishes compared with what was recorded."""

from workers.replay.adapters import Replay, replay_recording
from workers.replay.report import Difference, Report

__all__ = ["Difference", "Replay", "Report", "replay_recording"]
