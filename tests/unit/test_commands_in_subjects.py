"""A worker obeys a command on that command's own subject alone: rights are by subject."""

from __future__ import annotations

import anyio
import pytest

from fleetbus.auth.permissions import build_rights
from fleetbus.bus.memory import MemoryServer
from fleetbus.bus.streams import plan_run
from fleetbus.delivery.control import Control
from fleetbus.errors import RequestUnanswered
from fleetbus_schemas import ControlAnswered, ControlRequested, Subjects, decode, encode

SUBJECTS = Subjects("r")


@pytest.mark.parametrize("worker", ["i0", "all"])
async def test_a_drain_that_is_sent_as_a_ping_drains_nobody(worker: str) -> None:
    drain = anyio.Event()
    async with MemoryServer().connect("r") as bus, anyio.create_task_group() as group:
        control = Control(bus, SUBJECTS, role="inference", worker="i0", drain=drain)
        group.start_soon(control.run)
        await anyio.wait_all_tasks_blocked()
        order = encode(ControlRequested(command="drain"))
        with pytest.raises(RequestUnanswered):
            await bus.request(SUBJECTS.control("inference", worker, "ping"), order, timeout=0.2)
        assert not drain.is_set()
        subject = SUBJECTS.control("inference", worker, "drain")
        answer = await bus.request(subject, order, timeout=5)
        assert decode(ControlAnswered, answer, subject=subject).done and drain.is_set()
        group.cancel_scope.cancel()


@pytest.mark.parametrize(("role", "of"), [("environment", "inference"), ("gateway", "environment")])
def test_who_asks_whether_a_worker_lives_may_tell_it_nothing_else(role: str, of: str) -> None:
    told = [subject for _, subject in build_rights(role, plan_run("r")).calls if subject.startswith("fbctl.")]
    assert told == [SUBJECTS.control(of, "*", "ping")]
