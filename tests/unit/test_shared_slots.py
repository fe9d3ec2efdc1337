"""Runs that share the slots of one worker pull by weight, and a run that wakes has the next slot that is free."""

from __future__ import annotations

from collections import Counter

import anyio
from anyio.abc import TaskGroup

from fleetbus.bus.base import Bus, Delivery
from fleetbus.bus.memory import MemoryServer
from fleetbus.bus.streams import plan_run, tasks_consumer
from fleetbus.delivery.fair_shares import Share
from fleetbus.delivery.shared_slots import SharedSlots
from fleetbus_schemas import Subjects
from tests.support.virtual_time import virtual_time

anyio_backend = virtual_time
SLOTS = 8


async def serve(shared: SharedSlots, run: str, bus: Bus, turns: Counter[str], group: TaskGroup) -> None:
    async def work(delivery: Delivery) -> None:
        await anyio.sleep(1)
        await delivery.ack()
        turns[run] += 1

    with shared.join(run, bus, work) as slots:
        await slots.run({tasks_consumer("default"): SLOTS}, anyio.Event(), group)


async def test_saturated_runs_have_turns_by_weight_and_an_idle_one_leaves_all_to_the_other() -> None:
    shared = SharedSlots(SLOTS, {"a": Share(weight=3), "b": Share(weight=1)})
    turns = Counter[str]()
    async with MemoryServer().connect("a") as first, MemoryServer().connect("b") as second:
        buses = {"a": first, "b": second}
        for run, bus in buses.items():
            await bus.declare(plan_run(run, lanes=1))
        for number in range(400):
            await second.publish(Subjects("b").task("default", f"e{number}"), b"")
        async with anyio.create_task_group() as group:
            for run, bus in buses.items():
                group.start_soon(serve, shared, run, bus, turns, group)
            await anyio.sleep(10.5)
            assert turns["b"] >= 9 * SLOTS, "the slots of an idle run are used"
            for number in range(400):
                await first.publish(Subjects("a").task("default", f"e{number}"), b"")
            await anyio.sleep(3)
            before = turns.copy()
            await anyio.sleep(20)
            group.cancel_scope.cancel()
    counted = turns - before
    assert 2.5 <= counted["a"] / counted["b"] <= 3.5, counted
    assert counted.total() >= 18 * SLOTS
