"""Faults that only days show: rights that only a rare job needs, numbers that end, what is never removed.

See `tests/system/test_simulated_days.py`.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import anyio.lowlevel
import msgspec
import pytest

import fleetbus_workers.learner.checkpoint_storage as checkpoint_storage
import tests.support.checked_bus as checked_bus
from fleetbus.delivery.requests import Requests
from fleetbus_schemas.channels import CHANNELS, Channel
from fleetbus_workers.recorder.log_trimmer import LogTrimmer

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

    patch.setattr(checked_bus, "CHANNELS", tuple(map(restrict, CHANNELS)))
    patch.setattr(checked_bus, "_find_by_subject", cache(checked_bus._find_by_subject.__wrapped__))


def deadline_overflows_after_hours(patch: pytest.MonkeyPatch) -> None:
    """In a run that is nine hours old requests are given deadlines that are over."""
    build, began_ns = Requests.build_request, list[int]()

    def faulty(self: Requests, *arguments: Any, **named: Any) -> Any:
        request, now_ns = build(self, *arguments, **named), self._bus.now_ns()
        began_ns.append(now_ns)
        is_early = now_ns - began_ns[0] < OVERFLOW_SECONDS * 10**9
        return request if is_early else msgspec.structs.replace(request, deadline_ns=began_ns[0])

    patch.setattr(Requests, "build_request", faulty)


def nothing_trimmed(patch: pytest.MonkeyPatch) -> None:
    """The recorder archives, and removes nothing."""

    async def faulty(self: LogTrimmer) -> None:
        await anyio.lowlevel.checkpoint()

    patch.setattr(LogTrimmer, "trim", faulty)


def checkpoints_never_removed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(checkpoint_storage, "prune_checkpoints", lambda *arguments, **named: None)
