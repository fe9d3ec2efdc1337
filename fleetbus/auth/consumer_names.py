"""Consumers under names that cannot be guessed, for servers with accounts: the durable ones, and those of who only reads.

Whoever knows the name of a consumer can disturb it from any account that may ask the run's account anything at all: the server
hands a reply subject below ``$JS.ACK.`` on as it is, so an answer can be made an ack, and a consumer that delivers to the pull
subject of another one drains it. So the names are a secret of the server, the admin and those who pull: made from the
admin's key, each for itself, so that one that is known reveals nothing of another.

The readers of a monitor and of the recorder have names of their own key, as many as it may have at a time: their rights list
them, so that they cannot make consumers without end (docs/decisions/0188-a-monitor-reads-under-names-that-are-counted.md).
"""

import base64
import hashlib
import hmac
from collections.abc import Mapping

import msgspec

from fleetbus.bus.streams import READER, RunPlan

DIGEST_BYTES = 15
"""24 letters and digits behind the name."""

COUNTED: Mapping[str, int] = {"monitor": 32, "recorder": 16}
"""Users whose readers have names that their rights list, and how many readers of the log all who use such a key may have at a
time: each page, `top` or exporter has two or three, a recorder one, and six while it starts. All others need as many as there
are workers."""


def reader_names(run: str, user: str, seed: bytes) -> tuple[str, ...]:
    """The names of the consumers that a user reads by, whose own ``seed`` is; none: it may choose them."""
    if user not in COUNTED:
        return ()
    return tuple(_secret_name(run, f"{READER}{number}", seed) for number in range(COUNTED[user]))


def secret_names(plan: RunPlan, seed: bytes) -> dict[str, str]:
    """The plan's consumers by name, and what the server calls them; ``seed`` is that of the run's admin."""
    return {consumer.name: _secret_name(plan.run, consumer.name, seed) for consumer in plan.consumers}


def rename_consumers(plan: RunPlan, names: Mapping[str, str]) -> RunPlan:
    """The plan as it is declared by who knows the names that the server has for its consumers."""
    renamed = tuple(msgspec.structs.replace(consumer, name=names[consumer.name]) for consumer in plan.consumers)
    return msgspec.structs.replace(plan, consumers=renamed)


def _secret_name(run: str, name: str, seed: bytes) -> str:
    digest = hmac.new(seed, f"consumer {run} {name}".encode(), hashlib.sha256).digest()[:DIGEST_BYTES]
    return f"{name}-{base64.b32encode(digest).decode().lower()}"
