"""Faults to plant into what notices that a log went back in time. See `tests/system/test_simulated_power_loss.py`."""

from __future__ import annotations

from typing import Any

import pytest

import fleetbus.audit.run as audit
import fleetbus_workers.learner.publication as publication
import fleetbus_workers.learner.resume as resume
import fleetbus_workers.recorder.worker as recorder


def versions_of_the_log_alone(patch: pytest.MonkeyPatch) -> None:
    """The files of versions that the log has lost are not looked at."""
    patch.setattr(publication, "list_versions", lambda folder: set())


def checkpoints_of_the_log_alone(patch: pytest.MonkeyPatch) -> None:
    """Checkpoints that the log has lost are not looked at."""
    patch.setattr(resume, "list_checkpoints", lambda folder: [])


def archive_continued_over_other_entries(patch: pytest.MonkeyPatch) -> None:
    async def faulty(*arguments: Any) -> None:
        """Compares nothing."""

    patch.setattr(recorder, "_check_same_log", faulty)


def lost_entries_not_named(patch: pytest.MonkeyPatch) -> None:
    async def faulty(*arguments: Any) -> list[Any]:
        return []

    patch.setattr(audit, "find_lost_entries", faulty)
