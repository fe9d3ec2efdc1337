"""Stores who does what to a run, under the name of the key that does it, and keeps what cannot be stored yet in a file.

Above it are cancel, drain, pause and the commands that change keys or remove runs; below it the log. What is noted in a folder
goes into the log once an admin of the run connects: a run that is removed has no log any more, and a key that is replaced may
be that of who would write (docs/decisions/0244-operations-are-recorded-under-the-key-that-did-them.md).
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec
import structlog

from fleetbus.bus.base import LogBus
from fleetbus.concurrency.runtime import run_in_thread
from fleetbus.errors import LogFull, NotPermitted, PublishUnanswered, UserError
from fleetbus.secret_files import lock_folder, replace_secret_file
from fleetbus_schemas import MalformedMessage, OperationRecorded, Subjects, decode, encode
from fleetbus_schemas.message import UNREADABLE
from fleetbus_schemas.names import is_name
from fleetbus_schemas.operation import MAX_AUTHOR_CHARACTERS, MAX_TARGETS, NO_KEY

STORE_SECONDS = 5.0
"""For an entry, before what it tells of is done without."""

KEPT_NOTES = 256
"""Notes of a run that wait to be stored; the oldest are forgotten."""

MAX_NOTES_BYTES = 1 << 20
ENDING = ".operations"

log = structlog.get_logger()


class Noted(msgspec.Struct, frozen=True, kw_only=True):
    """An operation that waits to be stored: the public key that did it, the entry, and the server whose log it is for: empty
    for the run's own, None for any."""

    key: str
    entry: bytes
    server: str | None = None


def describe_operation(operation: str, targets: Sequence[str], author: str, *, at_ns: int = 0) -> OperationRecorded:
    """The entry for an operation; ``at_ns`` as in `OperationRecorded`."""
    return OperationRecorded(
        operation=operation,
        targets=tuple(targets[:MAX_TARGETS]),
        count=len(targets),
        author=author[:MAX_AUTHOR_CHARACTERS],
        at_ns=at_ns,
    )


async def record_operation(
    bus: LogBus, subjects: Subjects, operation: str, targets: Sequence[str] = (), *, author: str = "", role: str = "operator"
) -> bool:
    """Store that this connection's key does this now; False, with a line in the log, where that is not possible.

    It is stored before the thing is done, so that nobody who dies in between leaves it unsaid; an entry whose answer was lost
    may be there. What is to be done is done without an entry too: a full log is when workers have to be drained.
    """
    return await _store(bus, subjects.operation(role, bus.own_key or NO_KEY), describe_operation(operation, targets, author))


async def _store(bus: LogBus, subject: str, message: OperationRecorded) -> bool:
    try:
        await bus.publish(subject, encode(message, subject=subject), timeout=STORE_SECONDS)
    except (LogFull, PublishUnanswered, NotPermitted) as error:
        log.warning("operation is not recorded; doing it", operation=message.operation, reason=str(error))
        return False
    return True


def note_operation(folder: Path, run: str, key: str, message: OperationRecorded, server: str | None = None) -> None:
    """Keep an operation in a folder until an admin connects (`store_noted`). ``key`` is the public one, may be empty;
    ``server`` as in `Noted`. Raises `UserError`."""
    with _locked(folder, run) as file:
        noted = [*_read_notes(file), Noted(key=key or NO_KEY, entry=encode(message), server=server)]
        _write_notes(file, noted[-KEPT_NOTES:])


async def store_noted(bus: LogBus, subjects: Subjects, folder: Path, server: str = "") -> int:
    """Store what is noted in a folder about this run on this server, as its admin; returns how many. What the log does not take
    stays noted; who dies between storing and forgetting leaves it to be stored twice, with the same ``at_ns``."""
    stored = 0
    noted = await run_in_thread(_read_noted, folder, subjects.run, server)
    for each in noted:
        subject = subjects.operation("admin", each.key)
        try:
            message = decode(OperationRecorded, each.entry, subject=subject)
        except MalformedMessage as malformed:
            log.warning("noted operation is malformed; ignoring it", folder=str(folder), reason=malformed.reason)
        else:
            if not await _store(bus, subject, message):
                break
        stored += 1
    if stored:
        await run_in_thread(_forget, folder, subjects.run, noted[:stored])
    return stored


def _read_noted(folder: Path, run: str, server: str) -> list[Noted]:
    noted = _read_notes(folder / f"{run}{ENDING}")
    return [each for each in noted if is_name(each.key) and each.server in (None, server)]


def _forget(folder: Path, run: str, stored: Sequence[Noted]) -> None:
    with _locked(folder, run) as file:
        _write_notes(file, [each for each in _read_notes(file) if each not in stored and is_name(each.key)])


def now_ns() -> int:
    """This machine's clock, where no server's is known."""
    return time.time_ns()


@contextmanager
def _locked(folder: Path, run: str) -> Iterator[Path]:
    """The file of a run, for this process alone. Raises `UserError`."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise UserError(f"cannot write {folder}: {error.strerror}") from error
    with lock_folder(folder):
        yield folder / f"{run}{ENDING}"


def _read_notes(file: Path) -> list[Noted]:
    """The notes that are there; none of a file that cannot be read."""
    try:
        with file.open("rb") as opened:
            return msgspec.json.decode(opened.read(MAX_NOTES_BYTES), type=list[Noted])
    except FileNotFoundError:
        return []
    except (OSError, *UNREADABLE) as error:
        log.warning("noted operations cannot be read; beginning anew", file=str(file), reason=str(error))
        return []


def _write_notes(file: Path, noted: Sequence[Noted]) -> None:
    if not noted:
        file.unlink(missing_ok=True)
        return
    replace_secret_file(file, msgspec.json.encode(list(noted)))
