"""A bus that lets its role do what the table of channels says, and fails on anything else: also where no server would see it.

Workers in memory and in simulations have no keys. Behind this they meet the same rights, so a call without a right fails the
test that makes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial
from typing import Any

from fleetbus.auth.permissions import NARROW_READERS, get_user
from fleetbus_schemas.channels import CHANNELS, Channel, Way, covers_log


class Unentitled(AssertionError):
    """A role makes a call of the bus that the table of channels does not give it."""


_WAYS: dict[str, tuple[Way, ...]] = {
    "publish": ("send",),
    "broadcast": ("send",),
    "request": ("call",),
    "serve": ("serve",),
    "listen": ("hear",),
    "pull": ("work",),
    "ack_floors": ("work", "progress"),
    "last": ("last",),
    "history": ("batch",),
    "last_of_each": ("batch",),
    "next_entry": ("batch",),
    "read": ("scan",),
    "scan": ("scan",),
    "purge": ("purge",),
    "objects": ("send", "fetch"),
    "list_subjects": ("info",),
    "log_state": ("info",),
}
"""By call of the bus; one of them is enough."""

_ABOUT_THE_LOG = ("info", "floors", "purge")
"""These name no channel, or all of them."""


class CheckedBus:
    """``inner`` for a worker of ``role``. Only the calls of `fleetbus.bus.base.Bus` are checked; all others pass."""

    def __init__(self, inner: Any, role: str) -> None:
        self._inner = inner
        self._user = get_user(role)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        ways = _WAYS.get(name)
        if name == "history" and self._user in NARROW_READERS:
            ways = ("scan",)
        if name == "declare":
            raise Unentitled(f"{self._user} declares streams")
        return found if ways is None else partial(self._checked, found, name, ways)

    def _checked(self, call: Any, name: str, ways: tuple[Way, ...], *args: Any, **options: Any) -> Any:
        if name == "ack_floors" and not args:
            ways = ("floors",)
        if ways[0] in _ABOUT_THE_LOG:
            check(self._user, name, ways, "fb.RUN.>")
        else:
            subjects: Sequence[str] = (args[0],) if isinstance(args[0], str) else args[0]
            for subject in subjects:
                check(self._user, name, ways, subject)
        return call(*args, **options)


def check(user: str, name: str, ways: tuple[Way, ...], subject: str) -> None:
    """Raise `Unentitled` unless one of these ways is the user's on the channel of a subject, a consumer or a bucket."""
    channel = find_channel(name, subject)
    if channel is None or not any(_may(user, way, channel, subject) for way in ways):
        where = channel.name if channel is not None else "no channel"
        raise Unentitled(
            f"the role {user} calls {name} on {subject} ({where}): the table in fleetbus_schemas.channels gives it none of the "
            f"ways {', '.join(ways)} there"
        )


def find_channel(name: str, subject: str) -> Channel | None:
    if name in ("pull", "ack_floors") and not subject.startswith("fb."):
        return _find_by_consumer(subject.partition("_")[0])
    if name == "objects":
        return next(
            each
            for each in CHANNELS
            if each.kept in ("bucket", "images") and each.address.split(".")[1].startswith(subject[:9])
        )
    if subject.startswith("$JS."):
        subject = "fb.RUN.>"
    tokens = subject.split(".")
    return _find_by_subject(tokens[0], tokens[2] if tokens[0] == "fb" else "")


@cache
def _find_by_consumer(prefix: str) -> Channel | None:
    return next((channel for channel in CHANNELS if channel.consumer.startswith(f"{prefix}_")), None)


@cache
def _find_by_subject(first: str, kind: str) -> Channel | None:
    for channel in CHANNELS:
        tokens = channel.address.split(".")
        if tokens[0] == first and kind in ("", tokens[-1] if channel.name == "log" else tokens[2]):
            return channel
    return None


def _may(user: str, way: Way, channel: Channel, subject: str) -> bool:
    if channel.kept == "log" and covers_log(user, way):
        return True
    return any(_covers(use.of or (user,), channel, subject) for use in channel.uses if use.role == user and way in use.ways)


def _covers(roles: Sequence[str], channel: Channel, subject: str) -> bool:
    """Whether the subject is of one of these roles, where the channel names one."""
    named = channel.address.split(".")
    if "{role}" not in named or (subject.endswith(".>") and len(roles) > 1):
        return True
    return subject.split(".")[named.index("{role}")] in roles
