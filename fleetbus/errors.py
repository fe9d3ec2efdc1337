"""The tree of errors. A subclass says which boundary failed and what the caller should do.

FleetbusError
├── UserError                 bad input: one line that says what to do; the command line exits with 2
│   └── NotPermitted          the server forbids this user a subject: it has the wrong key, or lacks a right
├── RunFailed                 a run that was started from Python ended because one of its workers cannot work
├── TakenOver                 another worker has this one's place: stop for good, and do not start again
└── BusError                  the bus did not do what it was asked
    ├── SequenceConflict      compare-and-set refused, another writer was first: read the subject back
    ├── PublishUnanswered     no ack within the time limit, outcome unknown: read back or repeat the same id
    ├── LogFull               the log has no room: wait, or archive
    ├── LogLost               the log lost or changed what this worker stored or read: start again from what is left
    ├── NoResponders          the subject has no responders
    ├── RequestUnanswered     the responder did not answer in time
    └── BusClosed             the connection is gone for good
"""

from __future__ import annotations

import errno
from collections.abc import Iterator, Sequence
from typing import TypeVar

E = TypeVar("E", bound=BaseException)


class FleetbusError(Exception):
    """Base of every error that fleetbus raises on purpose."""


class UserError(FleetbusError):
    """Bad input. The message is one line that names what is wrong and what to do.

    Control characters in what it quotes are escaped: no line breaks, and nothing that a terminal would obey.
    """

    def __init__(self, message: str) -> None:
        super().__init__("".join(part if part.isprintable() else repr(part)[1:-1] for part in message))


class NotPermitted(UserError):
    """The server forbids this user to publish or subscribe to a subject. Not a `BusError`: waiting will not help."""


class RunFailed(FleetbusError):
    """A run ended because one of its workers crashed too often or cannot work as it is configured. ``log_lines`` are the last
    lines of that worker's log; the same call again resumes the run from its last checkpoint."""

    def __init__(self, message: str, log_lines: Sequence[str] = ()) -> None:
        super().__init__("\n".join((message, *(f"  | {line}" for line in log_lines))))
        self.log_lines = tuple(log_lines)


class TakenOver(FleetbusError):
    """Another worker has taken this one's place for good. Started again it would take the place back, and so would the other:
    two workers that are kept running would undo each other's work indefinitely. So it ends as if its work were done."""


class BusError(FleetbusError):
    """The bus did not do what it was asked."""


class SequenceConflict(BusError):
    """A compare-and-set was refused: the last sequence on the subject is not the expected one but ``last`` (None: unknown)."""

    def __init__(self, subject: str, expected: int, last: int | None = None) -> None:
        super().__init__(f"{subject}: the last sequence is not {expected}")
        self.subject = subject
        self.expected = expected
        self.last = last


class PublishUnanswered(BusError):
    """No acknowledgement within the time limit: the message may be stored or not."""


class LogFull(BusError):
    """The log has reached its limit and refuses messages until there is room."""


class LogLost(BusError):
    """The log no longer holds what this worker has stored or read in it: it went back in time, was cut or is damaged. The
    message says what is gone. Started again, the worker begins from what the log and the run's folder have."""


class NoResponders(BusError):
    """The subject of a request has no responders."""


class RequestUnanswered(BusError):
    """A request was not answered in time."""


class BusClosed(BusError):
    """The connection is closed for good; nothing more can be sent or received."""


def is_bad_input(error: BaseException) -> bool:
    """True if the error is a `UserError`, or a group out of a task group that holds nothing else."""
    return all(isinstance(leaf, UserError) for leaf in iterate_leaves(error))


def is_disk_full(error: BaseException) -> bool:
    """True if the disk, or this user's share of it, has no room for what was being written."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


def find_leaf(error: BaseException, kind: type[E]) -> E | None:
    """The first error of that kind in a group of any depth, or the error itself."""
    return next((leaf for leaf in iterate_leaves(error) if isinstance(leaf, kind)), None)


def iterate_leaves(error: BaseException) -> Iterator[BaseException]:
    """The error itself, or those in a group of any depth."""
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from iterate_leaves(inner)
    else:
        yield error
