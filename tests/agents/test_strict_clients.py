"""All answers parse with the newest official SDKs in their strict modes: `just test-agents`."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import anyio
import pytest

from fleetbus_workers.environment.adapters.agent.sessions import AgentSession
from tests.agents.endpoint_support import ANSWER, serving
from tests.agents.strict_clients import CLIENTS

SCRIPT = Path(__file__).with_name("strict_clients.py")
PYTHON = os.environ.get("AGENTS_PYTHON", "")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not PYTHON, reason="AGENTS_PYTHON names no Python with the clients: `just test-agents`"),
]


async def answer_all(session: AgentSession) -> None:
    while True:
        (await session.next_call()).set_answer(ANSWER)


@pytest.mark.parametrize("client", CLIENTS)
async def test_every_answer_is_what_the_sdks_types_say(client: str) -> None:
    async with serving(seconds=280) as (http, session), anyio.create_task_group() as group:
        group.start_soon(answer_all, session)
        command = [PYTHON, str(SCRIPT), client, str(http.base_url), session.key]
        done = await anyio.run_process(command, check=False, stderr=subprocess.STDOUT)
        group.cancel_scope.cancel()
    assert done.returncode == 0, done.stdout.decode()
