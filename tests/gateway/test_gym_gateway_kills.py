"""On a real server the worker of a session, then the gateway, are killed in mid-episode; the client's episode goes on."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from fleetbus_workers.environment.stepwise.journal_log import read_session_journal
from tests.support.gateway_processes import SUBJECTS, free_port, repeat_until_answered, start_processes
from tests.support.gym_service import Wire, new_boundary


@pytest.mark.integration
async def test_a_killed_worker_and_a_killed_gateway_change_nothing_for_the_client(tmp_path: Path) -> None:
    async with start_processes(tmp_path) as fleet, httpx.AsyncClient() as client:
        port = str(free_port())
        await fleet.start("g1", "gateway", "gym", "--port", port)
        for name in ("e1", "e2"):
            await fleet.start(name, "environment", "--environment", "scripted:5")
        wire = Wire(client, f"http://127.0.0.1:{port}")
        session = (await wire.connect())["session_id"]
        assert (await repeat_until_answered(wire, session, "one"))["obs"] == "turn 1"

        holder = (await read_session_journal(fleet.bus, SUBJECTS, session)).claim
        assert holder is not None
        fleet.kill(holder.worker)
        assert (await repeat_until_answered(wire, session, "two"))["obs"] == "turn 2"

        boundary = new_boundary()
        third = await repeat_until_answered(wire, session, "three", boundary=boundary)
        fleet.kill("g1")
        await fleet.start("g2", "gateway", "gym", "--port", port)
        assert await repeat_until_answered(wire, session, "three", boundary=boundary) == third

        assert (await repeat_until_answered(wire, session, "four"))["done"] is False
        last = await repeat_until_answered(wire, session, "five")
        assert (last["done"], last["reward"]) == (True, 1.0)
        journal = await read_session_journal(fleet.bus, SUBJECTS, session)
        steps = [record.call.text for record in journal.records if record.call.call == "step"]
        assert steps == ["one", "two", "three", "four", "five"]
