"""A named session asked for while the server is away: the client is told in the protocol's words, and comes back later."""

from __future__ import annotations

import json

import pytest

from fleetbus.bus import memory_bus
from tests.support.openenv_gateway import gateway


async def test_a_socket_for_a_session_that_cannot_be_looked_up_gets_an_error_frame(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_bus, "API_TIMEOUT_SECONDS", 0.3)
    async with gateway() as here:
        async with here.socket(session="mine") as socket:
            await socket.ask("reset", seed=1)
        here.fleet.server.kill()
        async with here.socket(session="other") as socket:
            frame = json.loads(await socket.connection.recv())
            assert (frame["type"], frame["data"]["code"]) == ("error", "EXECUTION_ERROR")
        here.fleet.server.restart()
        async with here.socket(session="other") as socket:
            assert (await socket.ask("reset", seed=2))["type"] == "observation"
