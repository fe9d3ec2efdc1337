"""Faults that only days show: rights that only a rare job needs, numbers that end, what is never removed.

See `tests/system/test_simulated_days.py`.
"""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

import fleetbus_workers.learner.checkpoint_storage as checkpoint_storage
import tests.support.checked_bus as checked_bus
from fleetbus.core.training.retention import Retention
from fleetbus.delivery.requests import Requests
from fleetbus_schemas.channels import CHANNELS, Channel

OVERFLOW_SECONDS = 1 << 15


def right_of_the_orphan_sweep_missing(patch: pytest.MonkeyPatch) -> None:
    """Environment workers may not follow the journals of sessions, which their sweep alone does, every ten minutes or more."""

    def restrict(channel: Channel) -> Channel:
        if channel.name != "sessions":
            return channel
        uses = tuple(
            msgspec.structs.replace(use, ways=tuple(way for way in use.ways if way != "scan"))
            if use.role == "environment"
            else use
            for use in channel.uses
        )
        return msgspec.structs.replace(channel, uses=uses)

    checked_bus._find_by_subject.cache_clear()
    patch.setattr(checked_bus, "CHANNELS", tuple(map(restrict, CHANNELS)))


def deadline_overflows_after_hours(patch: pytest.MonkeyPatch) -> None:
    """A requester that has run for nine hours gives deadlines that are over."""
    build = Requests.build_request

    def faulty(self: Requests, *arguments: Any, **named: Any) -> Any:
        request, now_ns = build(self, *arguments, **named), self._bus.now_ns()
        began_ns = vars(self).setdefault("began_ns", now_ns)
        if now_ns - began_ns < OVERFLOW_SECONDS * 10**9:
            return request
        return msgspec.structs.replace(request, deadline_ns=began_ns)

    patch.setattr(Requests, "build_request", faulty)


def nothing_settles(patch: pytest.MonkeyPatch) -> None:
    """The recorder archives, and removes nothing that was settled."""
    patch.setattr(Retention, "is_settled", lambda self, subject: False)
    patch.setattr(Retention, "limit", lambda self, last_sequence: 0)


def checkpoints_never_removed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(checkpoint_storage, "prune_checkpoints", lambda *arguments, **named: None)
