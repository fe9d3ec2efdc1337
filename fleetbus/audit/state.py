"""Keeps the state of an audit up to some entry in a file: the next audit of the same log reads only later entries.

An audit is a proof, so the state is one's own: a file of whoever audits, and nothing of it stands in the log. It is for the one
log that has the same entry where the state ends. Another log, one that went back in time, another version of fleetbus or a file
that is not whole is refused. What stands before that entry was proven when it was read; an audit without a state proves it
again.
"""

from __future__ import annotations

import gc
import hashlib
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version as find_version
from pathlib import Path
from typing import Annotated

import msgspec

from fleetbus.bus.base import StreamEntry
from fleetbus.core.audit.books import Audit
from fleetbus.errors import UserError
from fleetbus.files import replace_file
from fleetbus_schemas.message import UNREADABLE

_MAGIC = b"fleetbus audit state\n"
_DIGEST_BYTES = 32

BOOKS = 6
"""To be raised with what the books hold: older ones lack it, and would be taken for books of a log without it."""


class LogPosition(msgspec.Struct, frozen=True, kw_only=True):
    """The identity of one entry; no two have the same, in any log."""

    sequence: Annotated[int, msgspec.Meta(ge=1)]
    subject: str
    time_ns: int
    digest: bytes

    @classmethod
    def of(cls, entry: StreamEntry) -> LogPosition:
        """The position of an entry."""
        digest = hashlib.sha256(entry.payload).digest()
        return cls(sequence=entry.sequence, subject=entry.subject, time_ns=entry.time_ns, digest=digest)


class AuditState(msgspec.Struct, frozen=True, kw_only=True):
    """The ``books`` of ``run`` as `Audit.encode` has them, up to the entry at ``position``."""

    version: str
    run: str
    position: LogPosition
    books: bytes


def read_audit_state(file: Path, run: str) -> tuple[Audit, LogPosition] | None:
    """An audit to be continued behind its position; None if there is no such file. Raises `UserError`."""
    again = "remove it to audit the whole log again"
    try:
        if not stat.S_ISREG(file.stat().st_mode):  # a pipe would be waited for, and a device has no end
            raise UserError(f"{file} is no regular file: give another --state")
        content = file.read_bytes()
    except FileNotFoundError:
        if not os.access(file.parent, os.W_OK):
            raise UserError(f"cannot write {file}: there is no such folder, or it is not yours to write in") from None
        return None
    except OSError as error:
        raise UserError(f"cannot read {file}: {error.strerror}") from error
    body = content[len(_MAGIC) + _DIGEST_BYTES :]
    if not content.startswith(_MAGIC):
        raise UserError(f"{file} is not the state of an audit: give another --state")
    if hashlib.sha256(body).digest() != content[len(_MAGIC) :][:_DIGEST_BYTES]:
        raise UserError(f"{file} is damaged: {again}")
    try:
        version = msgspec.msgpack.decode(body, type=_Version).version
        if version != (version_here := _name_version()):
            raise UserError(f"{file} was written by fleetbus {version}, and this is {version_here}: {again}")
        state = msgspec.msgpack.decode(body, type=AuditState)
        if state.run != run:
            raise UserError(f"{file} is of run {state.run}: give another --state for run {run}")
        with _without_garbage_collection():
            return Audit.decode(state.books), state.position
    except UNREADABLE as error:
        raise UserError(f"{file} cannot be read ({error}): {again}") from error


def write_audit_state(file: Path, run: str, audit: Audit, position: LogPosition) -> None:
    """Replace the state in ``file``, a link to it stays one. Raises `UserError`, and then the file is as it was."""
    state = AuditState(version=_name_version(), run=run, position=position, books=audit.encode())
    body = msgspec.msgpack.encode(state)
    try:
        replace_file(file.resolve(), _MAGIC + hashlib.sha256(body).digest() + body)
    except OSError as error:
        raise UserError(f"cannot write {file}: {error.strerror}") from error


def _name_version() -> str:
    return f"{find_version('fleetbus')} (books {BOOKS})"


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Looking for cycles among hundreds of thousands of new objects, again and again, takes longer than making them."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class _Version(msgspec.Struct):
    """The fields that the states of every version begin with."""

    version: str
