"""The operations on a run: a fold of `OperationRecorded`, bounded whatever was stored. Pure.

The key stands in the subject, to which a server with accounts lets that key alone publish, and the admin; all else is the
writer's word (docs/decisions/0244-operations-are-recorded-under-the-key-that-did-them.md). Audit, `top` and the page show it.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence

import msgspec

from fleetbus_schemas.channels import BY_NAME
from fleetbus_schemas.operation import MAX_AUTHOR_CHARACTERS, MAX_OPERATION_CHARACTERS, MAX_TARGETS, NO_KEY, OperationRecorded

KEPT_OPERATIONS = 64
"""The newest ones; all are counted."""

SHORT_KEY = 12
"""Letters of a public key that are shown."""

SHOWN_TARGETS = 3
NS = 1_000_000_000
MAX_TARGET_CHARACTERS = 128


class Operation(msgspec.Struct, frozen=True, kw_only=True):
    """One operation. ``role`` and ``key`` (the public one) did it; ``time_ns`` is the log's, and ``at_ns`` the writer's word
    for when it was, 0 if at that time. ``count`` targets, the first of which are listed."""

    sequence: int
    time_ns: int
    role: str
    key: str
    operation: str
    targets: tuple[str, ...] = ()
    count: int = 0
    author: str = ""
    at_ns: int = 0

    @property
    def line(self) -> str:
        """Time, key, deed and targets in one line, of text that others wrote in part."""
        key = "without a key" if self.key == NO_KEY else self.key[:SHORT_KEY]
        more = f" and {self.count - SHOWN_TARGETS} more" if self.count > SHOWN_TARGETS else ""
        said = f" (says {self.author})" if self.author else ""
        when = datetime.datetime.fromtimestamp((self.at_ns or self.time_ns) // NS, datetime.UTC).strftime("%Y-%m-%d %H:%M:%SZ")
        text = " ".join([when, self.role, key, self.operation, *self.targets[:SHOWN_TARGETS]]) + more + said
        return " ".join(text.split())


def is_operation(tokens: Sequence[str]) -> bool:
    """True for the parts of a subject that names a role and a key: what an admin writes on another counts for nobody."""
    return len(tokens) == len(BY_NAME["operations"].address.split("."))


class Operations(msgspec.Struct):
    """Apply the entries in the order of the log. ``counted`` are all, ``newest`` the last of them."""

    counted: int = 0
    newest: list[Operation] = []

    def apply(self, message: OperationRecorded, sequence: int, subject: str, time_ns: int) -> None:
        """Take in an entry of the log."""
        role, key = subject.split(".")[3:5]
        targets = tuple(each[:MAX_TARGET_CHARACTERS] for each in message.targets[:MAX_TARGETS])
        self.counted += 1
        self.newest.append(
            Operation(
                sequence=sequence,
                time_ns=time_ns,
                role=role,
                key=key,
                operation=message.operation[:MAX_OPERATION_CHARACTERS],
                targets=targets,
                count=max(message.count, len(targets)),
                author=message.author[:MAX_AUTHOR_CHARACTERS],
                at_ns=message.at_ns if 0 < message.at_ns <= time_ns else 0,
            )
        )
        del self.newest[:-KEPT_OPERATIONS]
