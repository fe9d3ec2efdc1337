"""Bounds of trimming, on both buses: never over a message that its consumer has not acked."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import anyio
import pytest

from fleetbus.bus.base import Bus, Delivery
from fleetbus.bus.memory import MemoryServer
from fleetbus.bus.nats import connect
from fleetbus.bus.nats.server import run_server
from fleetbus.bus.streams import observations_consumer, plan_run, tasks_consumer
from fleetbus_schemas import Subjects
from fleetbus_workers.recorder.trim_limit import compute_trim_limit

S = Subjects("run")
END = 1 << 40


def never(_subject: str) -> bool:
    return False


@pytest.fixture(params=["memory", "nats"])
async def bus(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Bus]:
    if request.param == "memory":
        async with MemoryServer().connect("run") as memory:
            await memory.declare(plan_run("run", lanes=2))
            yield memory
        return
    async with run_server(tmp_path) as server, connect(server.url, run="run") as nats:
        await nats.declare(plan_run("run", lanes=2))
        yield nats


async def publish(bus: Bus, subject: str, count: int = 1) -> None:
    for number in range(count):
        await bus.publish(subject, b"%d" % number)


async def acked(bus: Bus, consumer: str, count: int) -> None:
    """Take and ack that many messages, and wait until the server knows it."""
    async with bus.pull(consumer, credits=count) as subscription:
        for _ in range(count):
            last: Delivery = await subscription.receive()
            await last.ack()
        floor = 0
        while floor < last.message.sequence:
            floor = {each.name: each.ack_floor for each in await bus.ack_floors()}[consumer]


def naive_floor(floors: dict[str, int]) -> int:
    """The lowest ack floor, of consumers that ever acked: with the idle ones, whose floor is 0, nothing is ever trimmed."""
    return min(floor for floor in floors.values() if floor)


async def test_the_naive_floor_drops_what_an_idle_consumer_has_yet_to_deliver_and_the_safe_floor_does_not(bus: Bus) -> None:
    waiting = S.observation("default", "i0", "a")
    with anyio.fail_after(50):
        await publish(bus, S.task("default", "a"))
        await publish(bus, waiting)  # nobody has pulled from lane i0 yet
        await publish(bus, S.observation("default", "any", "a"), 3)
        await acked(bus, tasks_consumer("default"), 1)
        await publish(bus, S.task("default", "b"))
        await acked(bus, tasks_consumer("default"), 1)
        await acked(bus, observations_consumer("default", "any"), 3)

        naive = naive_floor({floor.name: floor.ack_floor for floor in await bus.ack_floors()})
        safe = await compute_trim_limit(bus, limit=END, is_ignorable=never)
        assert naive >= 5
        assert safe == 1

        await bus.purge(S.observations(), below=safe + 1)
        async with bus.pull(observations_consumer("default", "i0"), credits=1) as subscription:
            assert (await subscription.receive()).message.sequence == 2  # and is not acked
        await bus.purge(S.observations(), below=naive + 1)
        assert await bus.next_entry(waiting, start=1) is None  # nobody was warned


async def test_the_lowest_ack_floor_of_all_never_moves_while_the_safe_floor_follows_the_log(bus: Bus) -> None:
    with anyio.fail_after(50):
        await publish(bus, S.episode("a"), 20)
        assert min(floor.ack_floor for floor in await bus.ack_floors()) == 0
        assert await compute_trim_limit(bus, limit=END, is_ignorable=never) == 20
        assert await compute_trim_limit(bus, limit=7, is_ignorable=never) == 7


async def test_a_message_that_is_held_keeps_everything_after_it(bus: Bus) -> None:
    with anyio.fail_after(50):
        await publish(bus, S.episode("a"), 4)
        await publish(bus, S.task("default", "a"), 1)
        await publish(bus, S.episode("a"), 4)
        async with bus.pull(tasks_consumer("default"), credits=1) as subscription:
            delivery = await subscription.receive()
            assert await compute_trim_limit(bus, limit=END, is_ignorable=never) == 4
            await delivery.ack()
            while (floor := await compute_trim_limit(bus, limit=END, is_ignorable=never)) == 4:
                pass
        assert floor == 9


async def test_a_settled_message_on_the_lane_of_a_dead_worker_holds_nobody_back(bus: Bus) -> None:
    with anyio.fail_after(50):
        await publish(bus, S.observation("default", "i1", "settled"), 2)
        await publish(bus, S.episode("settled"), 2)
        await publish(bus, S.observation("default", "i1", "open"), 1)
        await publish(bus, S.episode("settled"), 2)
        assert await compute_trim_limit(bus, limit=END, is_ignorable=never) == 0
        assert await compute_trim_limit(bus, limit=END, is_ignorable=lambda subject: subject.endswith(".settled")) == 4
