"""Trims the log: removes entries that are archived, settled, acked by all consumers and older than the duplicate window.

Only observations and actions are removed. Requests, claims, results and the learner's entries stay: compare-and-set needs them.
"""

from __future__ import annotations

from collections import deque

import structlog

from fleetbus.archive_writer import ArchiveWriter
from fleetbus.bus.base import Bus, StreamEntry
from fleetbus.core.retention import Retention
from fleetbus.episodes import read_entry
from fleetbus.runtime import Runtime
from fleetbus.trim_limit import compute_trim_limit
from fleetbus_schemas import EpisodeFinished, Message, Subjects
from fleetbus_schemas.stored import STORED

SAMPLES_PER_WINDOW = 64

_READ = {kind: STORED[kind] for kind in ("task", "episode", "train")}

log = structlog.get_logger()


class LogTrimmer:
    """Enter every archived entry in order, then trim now and then. ``last_entered`` is the last entry that was entered."""

    def __init__(
        self, bus: Bus, subjects: Subjects, archive: ArchiveWriter, *, window_seconds: float, runtime: Runtime
    ) -> None:
        self._bus = bus
        self._subjects = subjects
        self._archive = archive
        self._window_ns = int(window_seconds * 1e9)
        self._runtime = runtime
        self._retention = Retention()
        self._ages: deque[tuple[int, int]] = deque()
        self._old_sequence = 0
        self._unread: deque[tuple[StreamEntry, Message]] = deque()
        """Results of the last window: the client that requested an episode outside of training may be about to read its
        Actions."""
        self.last_entered = 0
        self.trimmed = 0

    @property
    def unsettled(self) -> int:
        """Episodes whose content is still needed."""
        return len(self._retention)

    def enter(self, entry: StreamEntry) -> None:
        """One entry that is in the archive for good."""
        message = _decode_entry(entry)
        if isinstance(message, EpisodeFinished):
            self._unread.append((entry, message))
        else:
            self._retention.enter(entry.sequence, entry.subject, message)
        self.last_entered = entry.sequence
        if not self._ages or entry.time_ns - self._ages[-1][1] >= self._window_ns // SAMPLES_PER_WINDOW:
            self._ages.append((entry.sequence, entry.time_ns))

    async def load_archived(self, last: int) -> None:
        """Everything up to ``last`` is in the archive: read what decides about trimming, and none of what is trimmed."""
        kinds = [self._subjects.tasks(), self._subjects.episodes, self._subjects.train("*")]
        async for entry in self._bus.scan(kinds):
            if entry.sequence <= last:  # what follows is entered once it is archived
                self.enter(entry)
        self._retention.mark_content_skipped()
        self.last_entered = last

    async def trim(self) -> None:
        """Remove what may be removed by now."""
        self._enter_read()
        limit = min(self._retention.limit(self.last_entered), self._find_expired_position())
        if limit <= self.trimmed:
            return
        floor = await compute_trim_limit(self._bus, limit=limit, is_ignorable=self._retention.is_settled)
        if floor <= self.trimmed:
            return
        await self._runtime.offload(self._archive.guard, floor)
        for subject in (self._subjects.observations(), self._subjects.actions()):
            await self._bus.purge(subject, below=floor + 1)
        self.trimmed = floor
        used, limit_bytes = await self._bus.usage()
        log.info("log trimmed", up_to=floor, used_bytes=used, limit_bytes=limit_bytes, unsettled=self.unsettled)

    def _enter_read(self) -> None:
        latest_ns = self._bus.now_ns() - self._window_ns
        while self._unread and self._unread[0][0].time_ns < latest_ns:
            entry, message = self._unread.popleft()
            self._retention.enter(entry.sequence, entry.subject, message)

    def _find_expired_position(self) -> int:
        """The newest sampled entry that is older than the duplicate window."""
        latest_ns = self._bus.now_ns() - self._window_ns
        while self._ages and self._ages[0][1] < latest_ns:
            self._old_sequence = self._ages.popleft()[0]
        return self._old_sequence


def _decode_entry(entry: StreamEntry) -> Message | None:
    expected = _READ.get(entry.subject.split(".", 3)[2])
    return read_entry(expected, entry) if expected is not None else None
