"""Runs that share the slots of one worker pull by weight, and a run that wakes has the next slot that is free."""

from __future__ import annotations

from collections import Counter

import anyio
from anyio.abc import TaskGroup

from fleetbus.bus.base import Bus, Delivery
from fleetbus.bus.memory import MemoryServer
from fleetbus.bus.streams import OBSERVATION_LEASE_SECONDS, observations_consumer, plan_run, tasks_consumer
from fleetbus.delivery.fair_shares import Share
from fleetbus.delivery.shared_slots import SharedSlots
from fleetbus_schemas import ANY_LANE, Subjects
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


async def test_what_comes_while_all_slots_are_in_use_has_the_next_one_and_is_delivered_once() -> None:
    """Longer than its lease: it is extended meanwhile. Handed back, it would seem to end every worker that it comes to."""
    shared, delivered, long = (
        SharedSlots(1, {"a": Share(), "b": Share()}),
        list[tuple[str, int]](),
        5 * OBSERVATION_LEASE_SECONDS,
    )

    async def serve_slowly(run: str, bus: Bus) -> None:
        async def work(delivery: Delivery) -> None:
            delivered.append((run, delivery.delivered))
            with anyio.move_on_after(long):
                while True:
                    await anyio.sleep(1)
                    await delivery.extend()
            await delivery.ack()

        with shared.join(run, bus, work) as slots:
            await slots.run({observations_consumer("default", ANY_LANE): 1}, anyio.Event(), group)

    async with MemoryServer().connect("a") as first, MemoryServer().connect("b") as second, anyio.create_task_group() as group:
        for run, bus in (("a", first), ("b", second)):
            await bus.declare(plan_run(run, lanes=1))
            group.start_soon(serve_slowly, run, bus)
        await anyio.sleep(1)
        for number in range(3):
            await first.publish(Subjects("a").observation("default", ANY_LANE, f"e{number}"), b"")
        await anyio.sleep(1)
        await second.publish(Subjects("b").observation("default", ANY_LANE, "e"), b"")
        await anyio.sleep(long + 1)
        assert delivered == [("a", 1), ("b", 1)]
        group.cancel_scope.cancel()
