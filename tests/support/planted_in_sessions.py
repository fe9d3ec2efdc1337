"""Faults to plant into step-wise sessions and their clients. See `tests/system/test_simulation_planted_faults.py`."""

from __future__ import annotations

import sys
from contextlib import asynccontextmanager
from typing import Any

import anyio.lowlevel
import msgspec
import pytest

import fleetbus_workers.environment.stepwise.host as host
import fleetbus_workers.environment.stepwise.journal_log as journal_log
import fleetbus_workers.environment.stepwise.session as session
from fleetbus.core.journal import Journal
from fleetbus_workers.gateway.gym_methods import GymCalls


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


def no_compare_and_set_of_sessions(patch: pytest.MonkeyPatch) -> None:
    async def faulty(bus: Any, subject: str, payload: bytes, expected_last: int, timeout: float) -> int:
        return int((await bus.publish(subject, payload)).sequence)

    patch.setattr(journal_log, "_publish_entry", faulty)


def session_left_open(patch: pytest.MonkeyPatch) -> None:
    async def faulty(self: session.StepwiseSession) -> None:
        await anyio.lowlevel.checkpoint()

    patch.setattr(session.StepwiseSession, "leave", faulty)


def sessions_without_slots(patch: pytest.MonkeyPatch) -> None:
    async def faulty(self: host.SessionHost, wait_seconds: float) -> bool:
        await anyio.lowlevel.checkpoint()
        return True

    patch.setattr(host.SessionHost, "_acquire_slot", faulty)


def session_unknown_to_a_replica(patch: pytest.MonkeyPatch) -> None:
    """One read decides whether there is such a session."""
    patch.setattr(host, "LAG_PAUSES_SECONDS", ())


def restored_without_steps(patch: pytest.MonkeyPatch) -> None:
    """Who takes a session over opens and resets its environment, and forgets what was done in it."""
    patch.setattr(session, "_REPLAYED_CALLS", ("open", "reset"))


def reset_moves_on_twice(patch: pytest.MonkeyPatch) -> None:
    """Two requests that repeat one reset each give the session a new environment's name."""

    def faulty(self: GymCalls, name: str, failed: str, journal: Journal) -> None:
        self._failed_journals.setdefault(name, []).append({each.call.key: each.answer for each in journal.records})

    patch.setattr(GymCalls, "_leave_failed", faulty)


def rollouts_without_their_last_turns(patch: pytest.MonkeyPatch) -> None:
    rollouts = sys.modules["fleetbus.client.rollouts"]  # the package has a function of the same name
    read = rollouts.read_actions

    async def faulty(bus: Any, subjects: Any, results: Any, **options: Any) -> Any:
        found = await read(bus, subjects, results, **options)
        return {episode: each[:-1] for episode, each in found.items()}

    patch.setattr(rollouts, "read_actions", faulty)


def one_session_call_at_a_time_forgotten(patch: pytest.MonkeyPatch) -> None:
    """Admissions of one session run side by side."""

    @asynccontextmanager
    async def faulty(self: host.SessionHost, name: str) -> Any:
        await anyio.lowlevel.checkpoint()
        yield

    patch.setattr(host.SessionHost, "_lock_session", faulty)
