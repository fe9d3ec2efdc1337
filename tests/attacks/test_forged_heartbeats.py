"""A gateway's key beats under the names of other roles' workers, and says what only they may: nobody takes it for theirs."""

from __future__ import annotations

from collections.abc import Generator

import anyio
import pytest

from fleetbus.config.settings import LimitSettings
from fleetbus.delivery.heartbeats import MOST_BYTES, SILENT_AFTER_SECONDS, decode_heartbeat, follow_heartbeats
from fleetbus_schemas import Heartbeat, MalformedMessage, WorkerFailed, WorkerRole, WorkerStarted, WorkerStopped, encode
from fleetbus_workers.observe.run.recent_workers import MOST_WORKERS
from fleetbus_workers.observe.run.worker_registry import NOTE_CHARACTERS, WorkerRegistry
from fleetbus_workers.up.progress_guard import MOST_PROBLEMS, SILENT_SECONDS, ProgressGuard
from tests.support.backends import asyncio_alone
from tests.support.bare_client import bare_client
from tests.support.secured_server import SUBJECTS, TRUST, SecuredServer, secured_server

pytestmark = pytest.mark.timeout(60)

anyio_backend = asyncio_alone

LEARNER = Heartbeat(role="learner", worker="learner-1", slots=2, in_flight=2, counters={"begun_work": 1.0})
FORGED = Heartbeat(
    role="gateway",
    worker="learner-1",
    paused=True,
    draining=True,
    problem="forged",
    counters={"actions": 1e9, "begun_reset": 7},
)
LIMITS = LimitSettings(no_progress=60.0)


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Generator[SecuredServer]:
    with secured_server(tmp_path_factory) as server:
        yield server


async def test_what_a_gateways_key_beats_is_a_gateways_and_pauses_no_learner(secured: SecuredServer) -> None:
    registry, guard, heard = WorkerRegistry(), ProgressGuard(LIMITS, 0.0), anyio.Event()

    def record(beat: Heartbeat) -> None:
        registry.record_heartbeat(beat, 0.0)
        guard.record_heartbeat(beat, 50.0)
        heard.set()

    registry.record_heartbeat(LEARNER, 0.0)
    with anyio.fail_after(30):
        async with secured.connect("monitor") as monitor, bare_client(secured, "gateway", TRUST) as attacker:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(follow_heartbeats, monitor, SUBJECTS.heartbeats, record)
                while not heard.is_set():
                    await attacker.send(SUBJECTS.heartbeat("gateway", "learner-1"), encode(FORGED))
                    await attacker.settle()
                tasks.cancel_scope.cancel()
    rows = {row.role: row for row in registry.rows(1.0)}
    assert (rows["learner"].state, rows["learner"].slots, rows["gateway"].state) == ("working", 2, "draining")
    assert not registry.is_paused
    assert {row.role: row.state for row in registry.rows(SILENT_AFTER_SECONDS + 1)} == {
        "learner": "silent",
        "gateway": "stopped",
    }
    assert guard.find_stall(61.0) is not None, "nothing progressed but what was forged"
    assert "admission is paused by request" not in guard.take_lines(51.0)


def test_a_life_entry_ends_no_worker_of_another_role() -> None:
    registry, guard = WorkerRegistry(), ProgressGuard(LIMITS, 0.0)
    for told in (registry, guard):
        told.record_heartbeat(LEARNER, 0.0)
    for ended in (
        WorkerStopped(role="environment", worker="learner-1"),
        WorkerFailed(role="environment", worker="learner-1", error_class="x", error="x"),
        WorkerStarted(role="environment", worker="learner-1", slots=0, lane="", host="", pid=1),
    ):
        registry.record_life_event(ended, 0.0, 0.5)
        guard.apply(ended, 0.5)
    assert [row.state for row in registry.rows(1.0) if row.role == "learner"] == ["working"]
    assert [line for line in guard.take_lines(SILENT_SECONDS + 1) if line.startswith("learner-1: no heartbeat")]


@pytest.mark.parametrize("role", ["environment", "inference", "gateway", "recorder"])
def test_no_invented_worker_ends_a_run_whose_learner_trains(role: WorkerRole) -> None:
    guard = ProgressGuard(LIMITS, 0.0)
    guard.record_heartbeat(Heartbeat(role=role, worker="ghost", slots=1, in_flight=1, problem="forged"), 0.0)
    guard.record_heartbeat(LEARNER, 59.0)
    assert guard.find_stall(100.0) is None


def test_names_without_end_push_out_no_worker_of_another_role_and_are_forgotten_themselves() -> None:
    registry, guard = WorkerRegistry(), ProgressGuard(LIMITS, 0.0)
    for told in (registry, guard):
        told.record_heartbeat(LEARNER, 0.0)
        for number in range(2 * MOST_WORKERS):
            told.record_heartbeat(Heartbeat(role="gateway", worker=f"g{number}", problem=f"forged {number}" * 1000), 0.0)
    rows = registry.rows(1.0)
    assert [row.worker for row in rows if row.role == "learner"] == ["learner-1"]
    assert len([row for row in rows if row.role == "gateway"]) == MOST_WORKERS
    lines = guard.take_lines(1.0) + guard.take_lines(SILENT_SECONDS + 1)
    assert len(lines) == 2 * MOST_PROBLEMS + 1 and max(map(len, lines)) < 600
    assert "learner-1: no heartbeat for 8 s: it is blocked, suspended or dead" in lines
    assert len(str(guard.find_stall(61.0))) < 10_000


def test_a_gateways_beat_in_the_name_of_a_silent_learner_makes_no_learner_hang() -> None:
    guard = ProgressGuard(LIMITS, 0.0)
    guard.record_heartbeat(FORGED, 0.0)
    for now in range(0, 200, 2):
        guard.record_heartbeat(LEARNER, float(now))
    assert guard.take_hung(199.0) == [("gateway", "learner-1")], "of which `up` has started none"


def test_of_a_failure_of_a_megabyte_only_its_beginning_is_kept() -> None:
    registry = WorkerRegistry()
    failed = WorkerFailed(role="inference", worker="i", error_class="x" * 1000, error="y" * 1_000_000)
    registry.record_life_event(failed, 0.0, 0.0)
    assert [(row.state, len(row.note)) for row in registry.rows(0.0)] == [("failed", NOTE_CHARACTERS)]


def test_a_heartbeat_of_a_megabyte_is_none() -> None:
    huge = Heartbeat(role="gateway", worker="g", problem="x" * MOST_BYTES)
    with pytest.raises(MalformedMessage, match="exceeds"):
        decode_heartbeat(SUBJECTS.heartbeat("gateway", "g"), encode(huge))
