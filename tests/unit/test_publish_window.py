"""The number of publishes under way at once: never more than there are places, whoever waits, gives up or is cancelled."""

from __future__ import annotations

import anyio
import pytest

from fleetbus.bus.nats.publisher import PublishWindow
from tests.support.backends import asyncio_alone

anyio_backend = asyncio_alone


class Publishes:
    """Publishes that stay under way until they are let go; ``most`` were at once."""

    def __init__(self, window: PublishWindow) -> None:
        self._window = window
        self.under_way: list[int] = []
        self.most = 0
        self.let_go = anyio.Event()

    async def publish(self, number: int, size: int = 1) -> None:
        if not self._window.try_acquire(size):
            await self._window.acquire(size, timeout=30)
        self.under_way.append(number)
        self.most = max(self.most, len(self.under_way))
        try:
            await self.let_go.wait()
            await anyio.lowlevel.checkpoint()
        finally:
            self.under_way.remove(number)
            self._window.release(size)


async def test_no_more_are_under_way_than_there_are_places() -> None:
    publishes = Publishes(PublishWindow(4, 1000))
    with anyio.fail_after(30):
        async with anyio.create_task_group() as group:
            for number in range(20):
                group.start_soon(publishes.publish, number)
            await anyio.wait_all_tasks_blocked()
            assert publishes.under_way == [0, 1, 2, 3]
            publishes.let_go.set()
    assert publishes.most == 4


async def test_no_more_bytes_are_under_way_than_fit_but_a_large_message_goes_alone() -> None:
    window = PublishWindow(100, 10)
    assert window.try_acquire(6)
    assert window.try_acquire(6), "room was left when it came"
    assert not window.try_acquire(1)
    window.release(6)
    window.release(6)
    assert window.try_acquire(1000)
    assert not window.try_acquire(1)


async def used(window: PublishWindow, entered: anyio.Event) -> None:
    await window.acquire(1, timeout=30)
    entered.set()
    window.release(1)


async def test_whoever_gives_up_or_is_cancelled_leaves_the_place_to_the_next() -> None:
    window = PublishWindow(1, 1000)
    assert window.try_acquire(1)
    first, second = anyio.Event(), anyio.Event()
    with anyio.fail_after(30):
        with pytest.raises(TimeoutError):
            await window.acquire(1, timeout=0.01)
        async with anyio.create_task_group() as group, anyio.create_task_group() as cancelled:
            cancelled.start_soon(used, window, first)
            await anyio.wait_all_tasks_blocked()
            group.start_soon(used, window, second)
            await anyio.wait_all_tasks_blocked()
            assert not window.try_acquire(1), "nobody overtakes who waits"
            cancelled.cancel_scope.cancel()
            window.release(1)
        assert second.is_set()
    assert window.try_acquire(1)
    assert not window.try_acquire(1)


async def test_a_place_that_is_given_in_the_moment_of_a_cancellation_is_not_lost() -> None:
    window = PublishWindow(1, 1000)
    assert window.try_acquire(1)
    with anyio.fail_after(30):
        async with anyio.create_task_group() as group:
            group.start_soon(used, window, anyio.Event())
            await anyio.wait_all_tasks_blocked()
            window.release(1)
            group.cancel_scope.cancel()
    assert window.try_acquire(1)
