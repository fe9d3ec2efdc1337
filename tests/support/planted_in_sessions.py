"""Faults to plant into step-wise sessions and their clients. See `tests/system/test_simulation_planted_faults.py`."""

from __future__ import annotations

from typing import Any

import anyio.lowlevel
import msgspec
import pytest

import fleetbus_workers.environment.stepwise.host as host
import fleetbus_workers.environment.stepwise.session as session
from fleetbus.core.episode.journal import Journal


def call_among_restored_ones(patch: pytest.MonkeyPatch) -> None:
    """A call that comes while its session is restored is executed at once."""

    async def faulty(self: session.StepwiseSession) -> None:
        await self._restore()

    patch.setattr(session.StepwiseSession, "restore", faulty)


def answer_not_recorded(patch: pytest.MonkeyPatch) -> None:
    """Steps are answered and recorded nowhere."""
    store = session.StepwiseSession._store

    async def faulty(self: session.StepwiseSession, entry: Any) -> None:
        if getattr(entry, "call", None) is None or entry.call.call != "step":
            await store(self, entry)

    patch.setattr(session.StepwiseSession, "_store", faulty)


def repeated_call_executed_again(patch: pytest.MonkeyPatch) -> None:
    answer = Journal.answer

    def faulty(self: Journal, call: Any) -> Any:
        return answer(self, msgspec.structs.replace(call, key=f"{call.key}?", number=-1) if call.call == "step" else call)

    patch.setattr(Journal, "answer", faulty)


def session_left_open(patch: pytest.MonkeyPatch) -> None:
    async def faulty(self: session.StepwiseSession) -> None:
        await anyio.lowlevel.checkpoint()

    patch.setattr(session.StepwiseSession, "leave", faulty)


def sessions_without_slots(patch: pytest.MonkeyPatch) -> None:
    def faulty(self: host.SessionHost) -> bool:
        return True

    patch.setattr(host.SessionHost, "_take_free_slot", faulty)


def restored_without_steps(patch: pytest.MonkeyPatch) -> None:
    """Who takes a session over opens and resets its environment, and forgets what was done in it."""
    patch.setattr(session, "_REPLAYED_CALLS", ("open", "reset"))
