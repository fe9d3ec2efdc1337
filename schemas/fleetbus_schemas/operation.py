"""Deeds of people upon a run, by its keys. On ``operation.<role>.<key>``, to which that role's key alone may publish; no worker
reads it."""

from __future__ import annotations

from fleetbus_schemas.message import Message

MAX_TARGETS = 16
"""Names that an entry lists; all of them are counted."""

MAX_OPERATION_CHARACTERS = 32
MAX_AUTHOR_CHARACTERS = 200

NO_KEY = "none"
"""In place of a key, on a server that asks for none."""


class OperationRecorded(Message, frozen=True, kw_only=True):
    """An operator or admin, by command or page → log, on ``operation.<role>.<key>``, before it is done.

    ``operation`` is ``cancel``, ``drain``, ``pause``, ``resume``, ``purge`` (a run of this name was removed), ``rotate``,
    ``revoke`` or ``renew``; readers show others as they are. ``targets`` are the first names that it concerns, ``count`` how
    many there are. Who did it is the key in the subject; ``author`` is what that says of itself. ``at_ns`` is when it was
    done, in Unix nanoseconds by the clock of who did it, where that was before the entry was stored; 0: then.
    """

    operation: str
    targets: tuple[str, ...] = ()
    count: int = 0
    author: str = ""
    at_ns: int = 0
