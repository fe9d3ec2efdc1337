"""Faults of a recorder, or of who claims beside one; planted by patching the workers' code for the length of a test."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

import fleetbus_workers.environment.episode.attempts as attempts
import fleetbus_workers.recorder.log_trimmer as log_trimmer
import fleetbus_workers.recorder.worker as recorder
from fleetbus.core.training.floor import merge_floors
from fleetbus.core.training.retention import Retention
from fleetbus.delivery.log_room import LogRoom
from fleetbus_schemas import FloorRaised, decode


def floor_not_read(patch: pytest.MonkeyPatch) -> None:
    """A first claim on a subject that everything has left is taken for the first ever."""

    async def faulty(self: attempts.Attempts, running: Any, claim_sequence: int) -> bool:
        return False

    patch.setattr(attempts.Attempts, "_drop_below_floor", faulty)


def removed_before_the_floor_is_raised(patch: pytest.MonkeyPatch) -> None:
    async def faulty(self: Any, raised: Any, last_floor: int, over: Any) -> bool:
        return True

    patch.setattr(log_trimmer.LogTrimmer, "_raise_floor", faulty)


def floor_above_open_groups(patch: pytest.MonkeyPatch) -> None:
    """The floor passes one group too many."""
    compute = Retention.compute_floor

    def faulty(self: Retention, last_sequence: int) -> Any:
        raised = compute(self, last_sequence)
        return msgspec.structs.replace(raised, groups={policy: number + 1 for policy, number in raised.groups.items()})

    patch.setattr(Retention, "compute_floor", faulty)


def room_not_estimated(patch: pytest.MonkeyPatch) -> None:
    """Admission counts what is stored, and not what the admitted episodes will still store."""
    patch.setattr(LogRoom, "bytes_per_episode", 0.0)


def full_disk_not_waited_for(patch: pytest.MonkeyPatch) -> None:
    """A recorder ends when its disk has no room."""
    patch.setattr(recorder, "is_disk_full", lambda error: False)


def floor_raised_over_an_unread_lineage(patch: pytest.MonkeyPatch) -> None:
    """The recorder expects the newest floor that stands, whatever it has not read before it."""
    raise_floor = log_trimmer.LogTrimmer._raise_floor

    async def faulty(self: Any, raised: Any, last_floor: int, over: Any) -> bool:
        stored = await self._bus.last(self._subjects.floor)
        last_floor = stored.sequence if stored is not None else 0
        newest = decode(FloorRaised, stored.payload, subject=stored.subject) if stored is not None else None
        return await raise_floor(self, merge_floors(raised, newest), last_floor, over)

    patch.setattr(log_trimmer.LogTrimmer, "_raise_floor", faulty)
