"""Recordings: a run's log as one self-describing file, written, read, cleaned of secrets, shown by episode."""

from fleetbus.recording.format import SUFFIX, RecordingDamaged, RecordingHeader
from fleetbus.recording.reader import Recording, RecordingReader, load_recording, read_header

__all__ = ["SUFFIX", "Recording", "RecordingDamaged", "RecordingHeader", "RecordingReader", "load_recording", "read_header"]
