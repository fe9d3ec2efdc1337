"""A full-text index over what was said in a run's episodes, in one SQLite file beside the log. Blocking; for any thread.

The index is a cache: it has the sequence up to which it was built, goes on from there, and may be deleted at any time. A
file that is damaged, of another log or of another version of this module is made anew, empty. Row ids are the episode's
number and the entry's sequence side by side, so that the episodes of a word are found without a look at any text.
"""

from __future__ import annotations

import os
import sqlite3
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from fleetbus.recording.said_text import SaidText
from fleetbus.recording.text_query import build_match

VERSION = 1
MAX_BYTES = 8 << 30
"""Above this the texts of the oldest episodes are removed, until about `KEPT` of it are left."""

KEPT = 0.8

SNIPPET_WORDS = 24
LOCK_SECONDS = 60.0

_BEGIN, _END = "\x02", "\x03"
_CLEAN = str.maketrans("", "", f"\x00{_BEGIN}{_END}")
_SHIFT = 32
_MASK = (1 << _SHIFT) - 1
_SCHEMA = """
CREATE TABLE state (version INTEGER, log TEXT, last_sequence INTEGER);
CREATE TABLE episodes (number INTEGER PRIMARY KEY, id TEXT UNIQUE);
CREATE VIRTUAL TABLE said USING fts5(text, turn UNINDEXED, role UNINDEXED, tokenize="unicode61 remove_diacritics 2");
"""


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """The first text of an episode that matches, and in how many ``texts`` of it the words are. ``parts`` are an excerpt,
    by turns without and with a match, beginning without."""

    episode_id: str
    turn: int
    role: str
    parts: tuple[str, ...]
    texts: int


class _OutdatedIndex(sqlite3.DatabaseError):
    """The file is of another log, or another version of this module wrote it."""


class TextIndex:
    """The index in ``file`` over the log of that identity; a context manager. Several processes may have it open."""

    def __init__(self, file: Path, log: str, *, max_bytes: int = MAX_BYTES) -> None:
        self._file = file
        self._log = log
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._inode = 0
        self._database = self._open()

    def __enter__(self) -> TextIndex:
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._database.close()

    @property
    def last_sequence(self) -> int:
        """The log's entries up to this one are indexed."""
        with self._reading() as database:
            return _read_last(database)

    def clear(self) -> None:
        """Make it anew, empty."""
        with self._lock:
            self._replace()

    def add(self, texts: Iterable[SaidText], last_sequence: int) -> None:
        """Index these texts, in order of their sequences; with them all entries up to ``last_sequence`` are."""
        with self._reading() as database, database:
            database.execute("BEGIN IMMEDIATE")
            known = _read_last(database)
            new = [text for text in texts if text.sequence > known]
            database.executemany("INSERT OR IGNORE INTO episodes (id) VALUES (?)", [(text.episode_id,) for text in new])
            rows = sorted(_build_row(database, text) for text in new)  # FTS5 begins another segment whenever ids go back
            database.executemany("INSERT INTO said (rowid, text, turn, role) VALUES (?, ?, ?, ?)", rows)
            database.execute("UPDATE state SET last_sequence = max(last_sequence, ?)", (last_sequence,))
        with self._reading() as database, database:
            self._remove_oldest(database)

    def find_episodes(self, text: str) -> set[str]:
        """The ids of all episodes in one text of which the words are; see `build_match`, also for what it raises."""
        query = "SELECT id FROM episodes WHERE number IN (SELECT DISTINCT rowid >> ? FROM said WHERE said MATCH ?)"
        with self._reading() as database:
            return {id for (id,) in database.execute(query, (_SHIFT, build_match(text)))}

    def describe(self, text: str, episodes: Sequence[str]) -> dict[str, Found]:
        """The first match in each of these episodes."""
        match = build_match(text)
        with self._reading() as database:
            return {found.episode_id: found for id in episodes if (found := _describe(database, match, id)) is not None}

    @contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection]:
        """The database for one thread at a time; a new one, empty, where somebody deleted it or it is found to be damaged."""
        with self._lock:
            if not self._is_there():
                self._replace()
            try:
                yield self._database
            except sqlite3.DatabaseError as error:
                if _is_damaged(error):
                    self._replace()
                raise

    def _is_there(self) -> bool:
        try:
            return self._file.stat().st_ino == self._inode
        except OSError:
            return False

    def _replace(self) -> None:
        self._database.close()
        self._remove_file()
        self._database = self._open()

    def _open(self) -> sqlite3.Connection:
        try:
            return self._open_file()
        except sqlite3.DatabaseError as error:
            if not _is_damaged(error):
                raise
            self._remove_file()
            return self._open_file()

    def _open_file(self) -> sqlite3.Connection:
        os.close(os.open(self._file, os.O_CREAT | os.O_RDWR, 0o600))  # transcripts are not for other users
        self._inode = self._file.stat().st_ino
        database = sqlite3.connect(self._file, timeout=LOCK_SECONDS, isolation_level=None, check_same_thread=False)
        try:
            with database:
                database.execute("BEGIN IMMEDIATE")
                tables = {name for (name,) in database.execute("SELECT name FROM sqlite_master")}
                states = database.execute("SELECT version, log FROM state").fetchall() if "state" in tables else []
                if states == [(VERSION, self._log)]:
                    return database
                if tables:
                    raise _OutdatedIndex("the index is of another log or another version")
                for statement in filter(None, map(str.strip, _SCHEMA.split(";"))):
                    database.execute(statement)
                database.execute("INSERT INTO state VALUES (?, ?, 0)", (VERSION, self._log))
            return database
        except BaseException:
            database.close()
            raise

    def _remove_file(self) -> None:
        for suffix in ("", "-journal"):
            self._file.with_name(self._file.name + suffix).unlink(missing_ok=True)

    def _remove_oldest(self, database: sqlite3.Connection) -> None:
        pages, free, size = (
            database.execute(f"PRAGMA {name}").fetchone()[0] for name in ("page_count", "freelist_count", "page_size")
        )
        used = (pages - free) * size
        if used <= self._max_bytes:
            return
        first, last = database.execute("SELECT min(number), max(number) FROM episodes").fetchone()
        end = first + max(1, int((last - first) * (1 - KEPT * self._max_bytes / used)))
        database.execute("BEGIN IMMEDIATE")
        database.execute("DELETE FROM said WHERE rowid < ?", (end << _SHIFT,))
        database.execute("DELETE FROM episodes WHERE number < ?", (end,))
        database.execute("INSERT INTO said (said, rank) VALUES ('merge', 1000)")


def _is_damaged(error: sqlite3.DatabaseError) -> bool:
    """False for what may pass, as a full disk or a lock that another process holds."""
    code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_OK) & 0xFF
    return isinstance(error, _OutdatedIndex) or code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


def _read_last(database: sqlite3.Connection) -> int:
    return int(database.execute("SELECT last_sequence FROM state").fetchone()[0])


def _build_row(database: sqlite3.Connection, said: SaidText) -> tuple[int, str, int, str]:
    number = database.execute("SELECT number FROM episodes WHERE id = ?", (said.episode_id,)).fetchone()[0]
    text = said.text.translate(_CLEAN).encode(errors="replace").decode()
    return number << _SHIFT | said.sequence & _MASK, text, said.turn, said.role


def _describe(database: sqlite3.Connection, match: str, id: str) -> Found | None:
    named = database.execute("SELECT number FROM episodes WHERE id = ?", (id,)).fetchone()
    if named is None:
        return None
    within = "said MATCH ? AND rowid BETWEEN ? AND ?"
    given: tuple[Any, ...] = (match, named[0] << _SHIFT, named[0] << _SHIFT | _MASK)
    texts = database.execute(f"SELECT count(*) FROM said WHERE {within}", given).fetchone()[0]
    excerpt = (
        f"SELECT turn, role, snippet(said, 0, '{_BEGIN}', '{_END}', '…', {SNIPPET_WORDS}) FROM said WHERE {within} LIMIT 1"
    )
    first = database.execute(excerpt, given).fetchone()
    if first is None:
        return None
    turn, role, snippet = first
    return Found(episode_id=id, turn=turn, role=role, parts=tuple(snippet.replace(_END, _BEGIN).split(_BEGIN)), texts=texts)
