"""The key of a session that is being played stays good when the server's clock is set past its deadline."""

from __future__ import annotations

import pytest

from fleetbus.bus.memory import MemoryServer
from fleetbus_schemas import EpisodeRequested, Subjects, Task
from fleetbus_workers.environment.adapters.agent.sessions import KeyRefused
from fleetbus_workers.gateway.agent_keys import SessionKeys
from fleetbus_workers.gateway.agent_sessions import AgentSessions
from tests.support.virtual_time import virtual_time

anyio_backend = virtual_time


async def test_a_key_ends_with_its_session_and_not_because_the_servers_clock_was_set() -> None:
    """Its agent was refused in the middle of an episode that had its whole time left."""
    server = MemoryServer()
    async with server.connect("r", worker="gateway") as bus:
        sessions = AgentSessions(bus, Subjects("r"), SessionKeys(b"secret" * 8, "r"))
        request = EpisodeRequested(
            episode_id="e", group_id="g", sample_index=0, split="train", task=Task(key="t"), policy="p",
            deadline_ns=bus.now_ns() + 3600 * 10**9,
        )  # fmt: skip
        session = sessions.open_session(request)
        sessions.admit_calls(session, request, is_new=True)
        server.step_clock(5 * 3600)
        assert sessions.read_episode([session.key]) == "e"
        sessions.remove(session, request)
        with pytest.raises(KeyRefused, match="expired"):
            sessions.read_episode([session.key])
