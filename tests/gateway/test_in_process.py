"""``fleetbus gateway --in-process``: environments in the gateway's process, recorded as any, and taken over by others."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from fleetbus_workers.environment.adapters.remote_gym.wire import decode_response
from fleetbus_workers.environment.stepwise.journal_log import read_session_journal
from tests.gateway.test_own_images import pixels
from tests.support.gateway_processes import RUN, SUBJECTS, free_port, repeat_until_answered, start_processes
from tests.support.gym_service import Wire
from tests.support.showing import painted

pytestmark = pytest.mark.integration


async def test_an_episode_with_images_is_played_and_recorded(tmp_path: Path) -> None:
    async with start_processes(tmp_path) as fleet, httpx.AsyncClient() as client:
        port = str(free_port())
        showing = ("--environment", "tests.support.showing:Shows", "--environment-images")
        await fleet.start("g1", "gateway", "gym", "--port", port, "--in-process", *showing)
        wire = Wire(client, f"http://127.0.0.1:{port}")
        response = await wire.post("/connect", {"env_config": {}, "seed": 1})
        begun = decode_response(response.headers["content-type"], response.content)
        assert [*map(pixels, begun.images)] == [painted(0).tobytes(), painted(1).tobytes()]
        session = begun.fields["session_id"]
        told = [await wire.call(session, "step", action_str=text) for text in ("one", "two")]
        assert [step["done"] for step in told] == [False, True]
        journal = await read_session_journal(fleet.bus, SUBJECTS, session)
        assert [record.call.text for record in journal.records if record.call.call == "step"] == ["one", "two"]
        assert journal.claim is not None and journal.claim.worker == "g1-hosted"


async def test_a_killed_gateway_s_sessions_go_on_at_a_worker_of_the_run(tmp_path: Path) -> None:
    async with start_processes(tmp_path) as fleet, httpx.AsyncClient() as client:
        port = str(free_port())
        gateway = ("gateway", "gym", "--port", port, "--environment", "scripted:3")
        await fleet.start("g1", *gateway, "--in-process")
        wire = Wire(client, f"http://127.0.0.1:{port}")
        session = (await wire.connect())["session_id"]
        assert (await repeat_until_answered(wire, session, "one"))["obs"] == "turn 1"
        fleet.kill("g1")
        await fleet.start("e1", "environment", "--environment", "scripted:3")
        await fleet.start("g2", *gateway)
        assert (await repeat_until_answered(wire, session, "two"))["obs"] == "turn 2"
        assert (await repeat_until_answered(wire, session, "three"))["reward"] == 1.0
        journal = await read_session_journal(fleet.bus, SUBJECTS, session)
        assert [record.call.text for record in journal.records if record.call.call == "step"] == ["one", "two", "three"]
        assert journal.claim is not None and journal.claim.worker == "e1"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--environment", "no_such_module:Class"), "no_such_module"),
        (("--environment", "scripted:3", "--environment-session-slots", "0"), "session_slots"),
    ],
)
async def test_what_is_wrong_with_the_environments_is_said_in_one_line(
    tmp_path: Path, options: tuple[str, ...], words: str
) -> None:
    async with start_processes(tmp_path) as fleet:
        command = [sys.executable, "-m", "fleetbus_workers.cli", "gateway", "openenv", "--port", "0", "--in-process", *options]
        ended = subprocess.run(  # noqa: ASYNC221
            [*command, "--nats", fleet.url, "--run", RUN], capture_output=True, text=True, timeout=50, check=False
        )
        assert ended.returncode == 2
        last = ended.stderr.strip().splitlines()[-1]
        assert words in last
        assert "Traceback" not in ended.stderr
