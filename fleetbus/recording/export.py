"""A run's log exported to a recording: all of it, or followed while it continues.

Entries come from the bus, an archive or another recording; they are cleaned, encoded and written in a thread, a frame's worth
at a time, so that the event loop keeps reading.
"""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Container, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import anyio
import anyio.to_thread

from fleetbus.bus.base import LogBus, StreamEntry
from fleetbus.config.seats import POLICIES
from fleetbus.core.training.joined_policies import JoinedPolicies
from fleetbus.errors import BusError
from fleetbus.log.stored_entries import read_stored
from fleetbus.recording.objects import References
from fleetbus.recording.reader import RecordingReader
from fleetbus.recording.redaction import Redactor
from fleetbus.recording.writer import FRAME_ENTRIES, RecordingWriter
from fleetbus_schemas import PolicyPublished, Subjects
from fleetbus_schemas.names import is_name

FLUSH_SECONDS = 1.0
"""While a log is followed, what came is readable after twice this."""

BUSY_ENTRIES = 256
"""A followed log that has this many in ``FLUSH_SECONDS`` is read once in that time."""

END_SECONDS = 5.0
"""How long a server that may be gone is asked how far its log goes."""

_FILE_NAME = re.compile(r"(?!\.+$)[\w.-]{1,200}", re.ASCII)

EPISODE_KINDS = frozenset({"task", "obs", "act", "episode", "label"})


class PublishedWeights(NamedTuple):
    """The weights of a version. ``policy`` is the one of a seat whose learner joined, empty for the run's own: the files of
    both have the same names."""

    policy: str
    uri: str

    def name_file(self, name: str) -> str:
        """The name in a recording of a file that the policy calls ``name``."""
        return f"{POLICIES}/{self.policy}/{name}" if self.policy else name


class Export:
    """Writes entries to a recording. ``selected`` episodes only, if given; ``redactor`` None keeps secrets.

    ``references`` are the objects that the written entries name.
    """

    def __init__(self, writer: RecordingWriter, *, redactor: Redactor | None, selected: Container[str] | None = None) -> None:
        self._writer = writer
        self._redactor = redactor
        self._selected = selected
        self.references = References()
        self.published: list[PublishedWeights] = []
        """Of the versions among the written entries."""
        self._joined = JoinedPolicies()
        self.seen = 0
        """Entries read so far, selected or not."""

    async def copy(self, entries: AsyncIterator[StreamEntry], *, progress: Callable[[int], None] = lambda seen: None) -> None:
        """Write all of ``entries``."""
        batch: list[StreamEntry] = []
        async for entry in entries:
            batch.append(entry)
            if len(batch) >= FRAME_ENTRIES:
                await anyio.to_thread.run_sync(self.write, batch)
                progress(self.seen)
                batch = []
        await anyio.to_thread.run_sync(self.write, batch)
        progress(self.seen)

    async def follow(
        self,
        bus: LogBus,
        subjects: Subjects,
        stop: anyio.Event,
        *,
        start: int,
        progress: Callable[[int], None] = lambda seen: None,
    ) -> None:
        """Write what is stored from ``start`` on until ``stop`` is set, flushing once a second; then what is there by then, if
        the server still is. Of a busy log nothing is read meanwhile: the server sends many entries at once for a third of what
        it takes to send each as it comes. Raises a group with a `BusError` once what came before it is written."""
        batch: list[StreamEntry] = []
        try:
            async with bus.read([subjects.log], start=start) as reader, anyio.create_task_group() as group:
                group.start_soon(_cancel_when_set, stop, group.cancel_scope)
                end = 0
                while True:
                    batch.append(await reader.receive())
                    limit = FRAME_ENTRIES if start < end else BUSY_ENTRIES
                    with anyio.move_on_after(FLUSH_SECONDS) as waited:
                        while len(batch) < limit and batch[-1].sequence != end:
                            batch.append(await reader.receive())
                    await self._write_and_flush(batch)
                    start, batch = batch[-1].sequence + 1, []
                    progress(self.seen)
                    if start > end and not waited.cancelled_caught:
                        await anyio.sleep(FLUSH_SECONDS)
                        end = await _find_end(bus)
        except* BusError:
            await self._write_and_flush(batch)
            raise
        await self._write_and_flush(batch)
        start = batch[-1].sequence + 1 if batch else start
        if start <= await _find_end(bus):
            await self.copy(bus.scan([subjects.log], start=start), progress=progress)

    async def _write_and_flush(self, batch: Sequence[StreamEntry]) -> None:
        """Write and flush; what was received is written whole even when following ends meanwhile."""
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(self.write, batch)
            await anyio.to_thread.run_sync(self._writer.flush)

    def write(self, entries: Sequence[StreamEntry]) -> None:
        """Select, clean and write; blocking."""
        self.seen += len(entries)
        chosen: Iterable[StreamEntry] = entries
        if self._selected is not None:
            chosen = (entry for entry in entries if is_selected(entry.subject, self._selected))
        if self._redactor is not None:
            chosen = map(self._redactor.clean, chosen)
        written = list(chosen)
        self.references.note(written)
        self.published += [weights for entry in written for weights in self._find_weights(entry)]
        self._writer.add(written)

    def _find_weights(self, entry: StreamEntry) -> Iterator[PublishedWeights]:
        if entry.subject.split(".", 3)[2] != "policy":
            return
        message = read_stored(entry)
        policy = entry.subject.rpartition(".")[2] if self._joined.covers(entry.subject, message) else ""
        if isinstance(message, PolicyPublished) and (not policy or is_name(policy)):  # it becomes a folder's
            yield PublishedWeights(policy, message.uri)


def is_selected(subject: str, episodes: Container[str]) -> bool:
    """True for entries of these episodes, and for the published versions that they were played with."""
    kind = subject.split(".", 3)[2]
    if kind == "policy":
        return True
    return kind in EPISODE_KINDS and subject.rpartition(".")[2] in episodes


async def _find_end(bus: LogBus) -> int:
    """The last sequence of the log; 0 if no server says in time."""
    try:
        with anyio.fail_after(END_SECONDS):
            return (await bus.log_state()).last_sequence
    except (TimeoutError, BusError):
        return 0


async def scan_recording(reader: RecordingReader) -> AsyncGenerator[StreamEntry]:
    """The entries of a recording, without blocking the event loop."""
    entries = reader.entries()
    while batch := await anyio.to_thread.run_sync(_read_batch, entries):
        for entry in batch:
            yield entry


def restore_files(files: dict[str, bytes], folder: Path, policy: str = "") -> dict[str, Path]:
    """Write the files of a recording to ``folder`` and return their paths by name: those of the ``policy`` of a seat, or those
    of no such policy. Names never leave the folder; what is no name of a file is left out."""
    folder.mkdir(parents=True, exist_ok=True)
    paths: dict[str, Path] = {}
    for name, content in files.items():
        kept, _, rest = name.rpartition("/") if name.startswith(f"{POLICIES}/") else ("", "", name)
        if kept != (f"{POLICIES}/{policy}" if policy else ""):
            continue
        if _FILE_NAME.fullmatch(last := Path(rest).name):
            paths[rest] = folder / last
            paths[rest].write_bytes(content)
    return paths


async def _cancel_when_set(stop: anyio.Event, scope: anyio.CancelScope) -> None:
    await stop.wait()
    scope.cancel()


def _read_batch(entries: Iterator[StreamEntry]) -> list[StreamEntry]:
    return list(islice(entries, FRAME_ENTRIES))
