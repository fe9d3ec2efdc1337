"""Full-text search of the page: an index of the run's log, which every search brings up to date.

Reading a long log takes minutes; meanwhile a search is answered from what is indexed, with how much of the log that is.
"""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import anyio.to_thread
import structlog

from fleetbus.bus.base import LogBus
from fleetbus.errors import BusError
from fleetbus.recording.text_index import Found, TextIndex
from fleetbus.recording.text_indexing import open_text_index, update_from_log
from fleetbus_schemas import Subjects

FRESH_SECONDS = 1.5
"""A search waits so long for what was stored before it to be indexed."""

RETRY_SECONDS = 5.0

log = structlog.get_logger()


class TextSearch:
    """Run `follow` beside the page; a search before that waits for it."""

    def __init__(self, bus: LogBus, subjects: Subjects, file: Path | None) -> None:
        self._bus = bus
        self._subjects = subjects
        self._file = file
        self._index: TextIndex | None = None
        self._wanted, self._updated = anyio.Event(), anyio.Event()
        self._begun = self._done = 0
        self.problem = ""
        """Why nothing can be searched now, empty if it can."""

    async def follow(self) -> None:
        """Bring the index up to date whenever somebody searches, for ever."""
        await self._wanted.wait()
        while True:
            try:
                async with self._open() as index:
                    while True:
                        self._wanted = anyio.Event()
                        self._begun += 1
                        await update_from_log(index, self._bus, self._subjects)
                        self._done, self.problem = self._begun, ""
                        self._notify()
                        await self._wanted.wait()
            except (BusError, sqlite3.Error, OSError) as error:
                self.problem = str(error) or type(error).__name__
                log.warning("text index is not up to date; trying again", reason=self.problem)
            self._notify()
            await anyio.sleep(RETRY_SECONDS)

    def _notify(self) -> None:
        self._updated.set()
        self._updated = anyio.Event()

    @asynccontextmanager
    async def _open(self) -> AsyncIterator[TextIndex]:
        created = (await self._bus.log_state()).created
        async with open_text_index(self._file, created) as index:
            self._index = index
            try:
                yield index
            finally:
                self._index = None

    async def find_episodes(self, text: str) -> set[str]:
        """The ids of the episodes in which the words of ``text`` are, as far as is indexed. Raises `UserError`, as
        `build_match`, and `sqlite3.Error`."""
        before = self._begun  # an update that has begun may have looked at the log before
        self._wanted.set()
        with anyio.move_on_after(FRESH_SECONDS):
            while self._done <= before:
                await self._updated.wait()
                if self.problem:
                    break
        index = self._index
        return set() if index is None else await anyio.to_thread.run_sync(index.find_episodes, text)

    async def describe(self, text: str, episodes: Sequence[str]) -> dict[str, Found]:
        """The first match in each of these."""
        index = self._index
        return {} if index is None else await anyio.to_thread.run_sync(index.describe, text, episodes)

    async def compute_share(self, last_sequence: int) -> float:
        """The share of a log that ends with this entry that is indexed."""
        index = self._index
        indexed = 0 if index is None else await anyio.to_thread.run_sync(lambda: index.last_sequence)
        return min(1.0, indexed / last_sequence) if last_sequence else 1.0
