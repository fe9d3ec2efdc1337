"""The message in an entry of the log, if its subject says it: who may write one kind of entry is not believed about others.

Rights are by subject (`fleetbus.auth.permissions`): an environment worker may store results, and no end of a training. A fold
must not count a message on a subject of another kind, or in the name of another episode or worker (docs/decisions/0263).
"""

from functools import lru_cache
from typing import Any, TypeVar

import structlog

from fleetbus.bus.base import StreamEntry
from fleetbus.core.audit.operations import is_operation
from fleetbus_schemas import AttemptStarted, MalformedMessage, Message
from fleetbus_schemas.channels import STORED
from fleetbus_schemas.message import decode_any
from fleetbus_schemas.names import is_name

log = structlog.get_logger()

M = TypeVar("M", bound=Message)

KEPT_SUBJECTS = 1 << 12


def read_stored(entry: StreamEntry) -> Message | None:
    """The message in an entry; None, and logged, if it is none that belongs on the entry's subject."""
    try:
        return decode_stored(entry)
    except MalformedMessage as malformed:
        log.warning("entry is malformed; ignoring it", sequence=entry.sequence, reason=malformed.reason)
        return None


def decode_one(expected: type[M], entry: StreamEntry) -> M:
    """`decode_stored` for an entry on subjects of which only messages of one type stand."""
    message = decode_stored(entry)
    if not isinstance(message, expected):
        raise MalformedMessage(entry.subject, f"{type(message).__name__} instead of {expected.__name__}")
    return message


@lru_cache(maxsize=KEPT_SUBJECTS)
def _split_subject(subject: str) -> tuple[str, list[str]]:
    """Its kind, and the names behind it. A subject of an episode is that of each of its turns."""
    _, _, kind, *names = subject.split(".")
    if kind not in STORED:
        raise MalformedMessage(subject, f"this version stores nothing on subjects of the kind {kind[:64]!r}")
    if not all(map(is_name, names)):  # a server stores wildcards as they stand; read back, they are everybody's
        raise MalformedMessage(subject, "its subject is not made of names")
    return kind, names


def decode_stored(entry: StreamEntry) -> Message:
    """The message in an entry; raises `MalformedMessage` if it is none that belongs on the entry's subject."""
    kind, names = _split_subject(entry.subject)
    message: Any = decode_any(STORED[kind], entry.payload, subject=entry.subject)
    if kind == "episode":
        is_own = names == [message.episode_id]
        if isinstance(message, AttemptStarted) and not is_name(message.lane):
            raise MalformedMessage(entry.subject, f"no lane is called {message.lane[:64]!r}")
    elif kind == "label":
        is_own = names == [message.episode_id]
    elif kind == "operation":
        is_own = is_operation(entry.subject.split("."))
    elif kind == "task":
        is_own = names[1:] == [message.episode_id]
    elif kind == "obs":
        is_own = (names[0], names[2:]) == (message.policy, [message.episode_id])
    elif kind == "act":
        is_own = names[1:] == [message.episode_id]
    elif kind == "session":
        is_own = names == [message.session]
    else:
        is_own = kind != "life" or names == [message.role, message.worker]
    if not is_own:
        raise MalformedMessage(entry.subject, f"the {type(message).__name__} names another one than its subject")
    found: Message = message
    return found
