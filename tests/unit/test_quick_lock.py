"""A lock that costs nothing while it is free: one holder at a time, in order, whoever is cancelled."""

from __future__ import annotations

import anyio
import anyio.lowlevel
import pytest

from fleetbus.concurrency.quick_lock import QuickLock


async def test_those_who_wait_get_it_one_at_a_time_in_order_of_arrival() -> None:
    lock, arrived, order, holders = QuickLock(), list[int](), list[int](), 0

    async def hold(number: int) -> None:
        nonlocal holders
        arrived.append(number)
        async with lock:
            holders += 1
            assert holders == 1
            order.append(number)
            await anyio.lowlevel.checkpoint()
            holders -= 1

    async with anyio.create_task_group() as group:
        for number in range(20):
            group.start_soon(hold, number)
    assert order == arrived
    assert len(order) == 20
    assert not lock.locked()


@pytest.mark.parametrize("waits_on", [True, False], ids=["while it waits", "in the turn in which it is given the lock"])
async def test_who_is_cancelled_keeps_nobody_waiting(waits_on: bool) -> None:
    lock = QuickLock()
    got: list[str] = []

    async def hold(name: str, scope: anyio.CancelScope) -> None:
        with scope:
            async with lock:
                got.append(name)

    async with anyio.create_task_group() as group:
        cancelled = anyio.CancelScope()
        async with lock:
            group.start_soon(hold, "first", cancelled)
            group.start_soon(hold, "second", anyio.CancelScope())
            await anyio.wait_all_tasks_blocked()
            cancelled.cancel()
            if waits_on:
                await anyio.wait_all_tasks_blocked()
    assert got == ["second"]
    assert not lock.locked()
