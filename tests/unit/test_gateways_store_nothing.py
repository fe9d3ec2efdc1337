"""A gateway's key cannot fill the log: it may store nothing in it, and what it says of its life stands in heartbeats."""

from __future__ import annotations

import anyio
import msgspec

from fleetbus.auth.permissions import build_rights
from fleetbus.bus.memory import MemoryServer
from fleetbus.bus.streams import plan_run
from fleetbus.delivery.heartbeats import SILENT_AFTER_SECONDS
from fleetbus.delivery.worker_lifecycle import WorkerLifecycle, run_lifecycle
from fleetbus_schemas import Heartbeat, Subjects, decode
from fleetbus_workers.observe.run.worker_registry import WorkerRegistry

SUBJECTS = Subjects("r")
BEAT = Heartbeat(role="gateway", worker="g0")


def test_a_gateways_key_publishes_nothing_that_is_kept() -> None:
    kept = [
        subject for subject in build_rights("gateway", plan_run("r")).publish if subject.startswith(("fb.", "fblane.", "$O."))
    ]
    assert kept == []


async def test_a_gateway_that_came_and_went_left_no_entry_and_is_shown_as_stopped() -> None:
    registry = WorkerRegistry()
    async with MemoryServer().connect("r") as bus, bus.listen(SUBJECTS.heartbeats) as heartbeats:
        await bus.declare(plan_run("r"))
        lifecycle = WorkerLifecycle(bus, SUBJECTS, role="gateway", worker="g0", beat=lambda: BEAT, lane=None)
        with anyio.fail_after(10):
            async with run_lifecycle(lifecycle, bus, None, slots=0):
                subject, payload = (await heartbeats.receive())[:2]
                registry.record_heartbeat(decode(Heartbeat, payload, subject=subject), 0.0)
            assert registry.rows(1.0)[0].state == "working"
            assert registry.rows(SILENT_AFTER_SECONDS + 1)[0].state == "silent", "one that was killed says nothing"
            subject, payload = (await heartbeats.receive())[:2]
            last = decode(Heartbeat, payload, subject=subject)
        assert msgspec.structs.replace(last, version="", protocol=0) == msgspec.structs.replace(BEAT, draining=True)
        assert (await bus.log_state()).last_sequence == 0
    registry.record_heartbeat(last, 2.0)
    assert registry.rows(SILENT_AFTER_SECONDS + 3)[0].state == "stopped"
