"""Reading a recording, also one whose writer was cut off: everything before the damage, and word of the damage. Blocking."""

from __future__ import annotations

import stat
from collections.abc import Iterator
from pathlib import Path

import msgspec

from fleetbus.bus.base import StreamEntry
from fleetbus.errors import UserError
from fleetbus.log.archive_format import ArchivedEntry, TornRecord, is_stored_subject
from fleetbus.recording.format import (
    OBJECTS,
    FilePart,
    RecordingDamaged,
    RecordingEnd,
    RecordingHeader,
    decode_archived_entry,
    read_parts,
    read_start,
)
from fleetbus_schemas import Subjects


class Recording(msgspec.Struct, kw_only=True):
    """A recording in memory. ``objects`` are the contents of the run's bucket by name; ``torn`` says in one line what is
    missing at its end, empty if nothing is."""

    path: Path
    header: RecordingHeader
    entries: list[StreamEntry]
    files: dict[str, bytes] = msgspec.field(default_factory=dict)
    objects: dict[str, bytes] = msgspec.field(default_factory=dict)
    torn: str = ""

    @property
    def run(self) -> str:
        return self.header.run

    @property
    def subjects(self) -> Subjects:
        return Subjects(self.header.run)

    @property
    def seconds(self) -> float:
        """Time between the first entry and the last."""
        return (self.entries[-1].time_ns - self.entries[0].time_ns) / 1e9 if self.entries else 0.0


class RecordingReader:
    """Streams a recording. ``torn``, ``files`` and ``objects`` are final when `entries` has ended."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.header = read_header(path)
        self.files: dict[str, bytes] = {}
        self.objects: dict[str, bytes] = {}
        self.torn = ""
        self._growing: dict[str, bytearray] = {}
        self._ended = False
        self._subjects = Subjects(self.header.run).log.removesuffix(">")

    def entries(self) -> Iterator[StreamEntry]:
        """All whole entries in order."""
        count = 0
        with self.path.open("rb") as file:
            read_start(file, self.path)
            try:
                for part in read_parts(file):
                    if isinstance(part, list):
                        self._check_subjects(part)
                        count += len(part)
                        yield from self._entries(part)
                    else:
                        self._note(part)
            except TornRecord as torn:
                self.torn = f"{self.path} is damaged at byte {torn.offset}: the {count} entries before are whole"
        if not self._ended and not self.torn:
            self.torn = f"{self.path} has no end: its writer was cut off after {count} entries"

    def _is_of_run(self, subject: str) -> bool:
        return subject.startswith(self._subjects) and is_stored_subject(subject)

    def _check_subjects(self, part: list[ArchivedEntry]) -> None:
        if not all(self._is_of_run(entry.subject) for entry in part):
            raise RecordingDamaged(f"{self.path} has entries that are not of run {self.header.run}")

    def _entries(self, part: list[ArchivedEntry]) -> Iterator[StreamEntry]:
        return (decode_archived_entry(entry) for entry in part)

    def _note(self, part: FilePart | RecordingEnd) -> None:
        if isinstance(part, RecordingEnd):
            self._ended = True
            return
        content = self._growing.setdefault(part.name, bytearray())
        if len(content) == part.offset:
            content += part.data
        if part.last:
            whole = bytes(self._growing.pop(part.name))
            if part.name.startswith(OBJECTS):
                self.objects[part.name.removeprefix(OBJECTS)] = whole
            else:
                self.files[part.name] = whole


def read_header(path: Path) -> RecordingHeader:
    """Read the origin of a recording; raises `UserError`."""
    try:
        if stat.S_ISFIFO(path.stat().st_mode):
            raise UserError(f"{path} is a pipe, and a recording is read more than once: store it in a file")
        with path.open("rb") as file:
            return read_start(file, path)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error


def load_recording(path: Path) -> Recording:
    """The whole recording in memory; raises `UserError`."""
    reader = RecordingReader(path)
    entries = list(reader.entries())
    return Recording(
        path=path, header=reader.header, entries=entries, files=reader.files, objects=reader.objects, torn=reader.torn
    )
