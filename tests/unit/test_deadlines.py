"""Deadlines under one timer, one after another: who is late is cancelled, and whole again outside of the scope."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import anyio.lowlevel
import pytest

from fleetbus.concurrency.deadlines import Deadlines
from fleetbus.concurrency.loop_clock import get_clock

pytestmark = pytest.mark.anyio


@asynccontextmanager
async def run_deadlines() -> AsyncIterator[Deadlines]:
    deadlines = Deadlines()
    async with anyio.create_task_group() as group:
        group.start_soon(deadlines.run)
        yield deadlines
        group.cancel_scope.cancel()


async def test_the_clock_is_that_of_the_loop() -> None:
    assert get_clock()() == pytest.approx(anyio.current_time(), abs=0.1)


async def test_who_is_late_is_cancelled_and_goes_on_after_the_scope() -> None:
    async with run_deadlines() as deadlines:
        with deadlines.open() as deadline:
            deadline.move(anyio.current_time() + 0.01)
            async with anyio.create_task_group() as group:
                group.start_soon(anyio.sleep_forever)
        assert deadline.is_over
        assert not deadline.is_whole_over
        with anyio.move_on_after(5) as scope:
            await anyio.sleep(0.01)
        assert not scope.cancelled_caught


async def test_a_cleared_limit_is_forgotten_and_an_earlier_one_wakes_the_timer() -> None:
    async with run_deadlines() as deadlines:
        with deadlines.open(anyio.current_time() + 60) as long, deadlines.open() as short:
            await anyio.wait_all_tasks_blocked()
            short.move(anyio.current_time() + 0.02)
            await anyio.lowlevel.checkpoint()
            short.clear()
            await anyio.sleep(0.05)
            assert not short.is_over
            short.move(anyio.current_time() + 0.01)
            with anyio.fail_after(5):
                await anyio.sleep_forever()
        assert short.is_over
        assert not long.is_over


async def test_of_many_only_the_late_are_cancelled() -> None:
    late: list[int] = []

    async def wait(deadlines: Deadlines, index: int) -> None:
        with deadlines.open() as deadline:
            deadline.move(anyio.current_time() + (0.01 if index % 2 else 60.0))
            await anyio.sleep(30.0 if index % 2 else 0.1)
        if deadline.is_over:
            late.append(index)

    async with run_deadlines() as deadlines, anyio.create_task_group() as group:
        for index in range(10):
            group.start_soon(wait, deadlines, index)
    assert sorted(late) == [1, 3, 5, 7, 9]


@pytest.mark.parametrize("when", ["inside", "before"])
async def test_what_is_cancelled_though_no_limit_has_passed_ends_and_is_not_late(when: str) -> None:
    deadlines = Deadlines()
    deadline, reached = deadlines.open(anyio.current_time() + 3600), False
    if when == "before":
        deadline.cancel()
    with deadline:
        if when == "inside":
            deadline.cancel()
        await anyio.sleep_forever()
        reached = True
    assert deadline.is_cancelled
    assert not deadline.is_over
    assert not reached
