"""A replica in memory is behind by seconds, whatever the server's clock was set to in the meantime."""

from __future__ import annotations

import anyio
import pytest

from fleetbus.bus.memory import Faults, MemoryServer
from fleetbus.bus.streams import plan_run
from fleetbus_schemas import Subjects
from tests.support.virtual_time import virtual_time

S = Subjects("r")

anyio_backend = virtual_time


class Lagging(Faults):
    def draw_read_lag(self, worker: str, subject: str) -> float:
        return 1.0


@pytest.mark.parametrize("hours", [-5, 5])
async def test_a_replica_has_what_was_stored_before_the_clock_was_set(hours: int) -> None:
    """Set back, the clock hid from readers for hours what they had read before."""
    server = MemoryServer(faults=Lagging())
    async with server.connect("r", worker="writer") as writer, server.connect("r", worker="reader") as reader:
        await writer.declare(plan_run("r", lanes=1))
        await writer.publish(S.episode("e"), b"x")
        await anyio.sleep(10)
        server.step_clock(hours * 3600)
        found = await reader.last(S.episode("e"))
        assert found is not None
