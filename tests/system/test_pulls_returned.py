"""Messages that were pulled and not taken go to others at once, also those on their way when the puller left."""

from __future__ import annotations

import time
from pathlib import Path

import anyio
import anyio.lowlevel
import msgspec

from fleetbus.bus.nats import connect
from fleetbus.bus.nats.bus import NatsBus
from fleetbus.bus.nats.protocol import publish_command
from fleetbus.bus.nats.server import run_server
from fleetbus.bus.streams import ConsumerPlan, plan_run
from fleetbus_schemas import Subjects

SUBJECTS = Subjects("r")
COUNT = 5


async def test_what_arrives_after_a_puller_has_left_is_handed_back(tmp_path: Path) -> None:
    """A lease would give it to nobody before ten minutes are over."""
    consumer = ConsumerPlan(name="work", filter=SUBJECTS.tasks("default"), ack_wait_seconds=600)
    plan = msgspec.structs.replace(plan_run("r", lanes=1), consumers=(consumer,))
    with anyio.fail_after(50):
        async with run_server(tmp_path) as server, connect(server.url, run="r") as bus, connect(server.url, run="r") as other:
            await bus.declare(plan)
            assert isinstance(bus, NatsBus)
            connection = bus._connection
            async with bus.pull("work", credits=COUNT):
                await connection.round_trip(10)  # the server has the pull request now
                for number in range(COUNT):
                    connection.wire.send(publish_command(SUBJECTS.task("default", f"e{number}"), "", b"request"))
                while connection.wire.unwritten_bytes:
                    await anyio.lowlevel.checkpoint()
                time.sleep(0.5)  # noqa: ASYNC251  # what the server sends meanwhile is not read before the puller has left
            async with other.pull("work", credits=COUNT) as subscription:
                found = {(await subscription.receive()).message.sequence for _ in range(COUNT)}
    assert len(found) == COUNT
