"""Everybody who waits for a change is woken by it, also those who began to wait before others did."""

from __future__ import annotations

import anyio
import anyio.lowlevel

from fleetbus.concurrency.notifier import Notifier
from fleetbus.delivery.slots import Slots
from tests.simulation.platform.bus import Gate


async def test_all_who_wait_are_woken_and_wait_anew_for_the_next_change() -> None:
    changed, value, seen = Notifier(), [0], list[int]()

    async def wait_for(wanted: int) -> None:
        while value[0] < wanted:
            await changed.wait()
        seen.append(wanted)

    with anyio.fail_after(5):
        async with anyio.create_task_group() as group:
            for wanted in (1, 2, 1, 2):
                group.start_soon(wait_for, wanted)
            for _ in range(2):
                await anyio.wait_all_tasks_blocked()
                value[0] += 1
                changed.notify()
    assert seen == [1, 1, 2, 2]


async def test_a_waiter_that_is_cancelled_takes_nothing_from_the_others() -> None:
    changed = Notifier()
    with anyio.fail_after(5):
        async with anyio.create_task_group() as group:
            group.start_soon(changed.wait)
            with anyio.move_on_after(0):
                await changed.wait()
            await anyio.wait_all_tasks_blocked()
            changed.notify()


async def test_everybody_who_waits_for_free_slots_hears_that_they_are_free() -> None:
    slots = Slots(None, None)  # type: ignore[arg-type]  # neither is used while nothing is pulled
    slots.in_flight = 1
    slots._pulling = False

    async def work(_: object) -> None:
        await anyio.lowlevel.checkpoint()

    slots._work = work
    with anyio.fail_after(5):
        async with anyio.create_task_group() as group:
            for _ in range(4):
                group.start_soon(slots.wait_until_idle)
            await anyio.wait_all_tasks_blocked()
            await slots._run_delivery(None, None)  # type: ignore[arg-type]


async def test_a_gate_that_is_closed_twice_opens_for_all() -> None:
    gate = Gate()
    gate.close()
    with anyio.fail_after(5):
        async with anyio.create_task_group() as group:
            group.start_soon(gate.wait_open)
            await anyio.wait_all_tasks_blocked()
            gate.close()
            group.start_soon(gate.wait_open)
            await anyio.wait_all_tasks_blocked()
            gate.open()
