"""Tasks that cost little memory and are as well looked after as those of any task group."""

from __future__ import annotations

import asyncio
import tracemalloc

import anyio
import pytest

from fleetbus.concurrency.compact_tasks import CompactTasks, open_compact_task_group

pytestmark = pytest.mark.anyio


async def test_the_group_ends_after_its_last_task() -> None:
    ended, go = list[int](), anyio.Event()

    async def work(number: int) -> None:
        await go.wait()
        ended.append(number)

    async with open_compact_task_group() as group:
        for number in range(3):
            group.start_soon(work, number)
        await anyio.wait_all_tasks_blocked()
        assert not ended
        go.set()
    assert sorted(ended) == [0, 1, 2]


async def test_what_cancels_the_group_cancels_each_task_and_waits_for_what_it_still_does() -> None:
    cleaned = list[int]()

    async def work(number: int) -> None:
        try:
            await anyio.sleep_forever()
        finally:
            with anyio.CancelScope(shield=True):
                await anyio.sleep(0.01)
                cleaned.append(number)

    with anyio.move_on_after(0.01) as scope:
        async with open_compact_task_group() as group:
            for number in range(3):
                group.start_soon(work, number)
    assert scope.cancelled_caught
    assert sorted(cleaned) == [0, 1, 2]


@pytest.mark.parametrize("within", ["a task", "the block"])
async def test_the_first_failure_ends_all_and_is_raised(within: str) -> None:
    cancelled = list[int]()

    async def work(number: int) -> None:
        try:
            await anyio.sleep_forever()
        except anyio.get_cancelled_exc_class():
            cancelled.append(number)
            raise

    async def fail() -> None:
        await anyio.lowlevel.checkpoint()
        raise OSError("gone")

    with pytest.raises(BaseExceptionGroup) as raised:
        async with open_compact_task_group() as group:
            for number in range(3):
                group.start_soon(work, number)
            await anyio.wait_all_tasks_blocked()
            if within == "the block":
                raise OSError("gone")
            group.start_soon(fail)
            await anyio.sleep_forever()
    assert [type(error) for error in raised.value.exceptions] == [OSError]
    assert sorted(cancelled) == [0, 1, 2]


async def test_what_a_task_raises_while_it_is_cancelled_is_not_lost() -> None:
    async def work() -> None:
        try:
            await anyio.sleep_forever()
        finally:
            raise OSError("not closed")

    with pytest.raises(BaseExceptionGroup) as raised, anyio.move_on_after(0.01):
        async with open_compact_task_group() as group:
            group.start_soon(work)
    assert raised.group_contains(OSError, match="not closed")


async def test_a_task_that_is_started_while_the_group_is_cancelled_is_cancelled_too() -> None:
    states = list[str]()

    async def late() -> None:
        try:
            await anyio.sleep_forever()
        finally:
            states.append("late one ended")

    with anyio.move_on_after(0.01):
        async with open_compact_task_group() as group:

            async def work() -> None:
                try:
                    await anyio.sleep_forever()
                finally:
                    group.start_soon(late)

            group.start_soon(work)
    assert states == ["late one ended"]


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_task_that_a_library_cancels_ends_the_group_with_an_error() -> None:
    async def work() -> None:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        await anyio.sleep_forever()

    with pytest.raises(BaseExceptionGroup) as raised:
        async with open_compact_task_group() as group:
            group.start_soon(work)
    assert raised.group_contains(RuntimeError, match="cancelled by a library")


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_nothing_is_started_in_a_group_that_has_ended() -> None:
    async with open_compact_task_group() as group:
        pass
    with pytest.raises(RuntimeError, match="has ended"):
        group.start_soon(anyio.sleep_forever)


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_task_that_waits_holds_less_than_two_kib() -> None:
    """4 KiB in a group of anyio's."""
    count, go = 500, asyncio.get_running_loop().create_future()

    async def work() -> None:
        await go

    async with open_compact_task_group() as group:
        assert isinstance(group, CompactTasks)
        tracemalloc.start()
        try:
            for _ in range(count):
                group.start_soon(work)
            await anyio.wait_all_tasks_blocked()
            held, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        go.set_result(None)
    assert held / count < 2048
