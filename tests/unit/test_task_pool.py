"""Tasks that are used again: every call runs, side by side where they wait, and what one raises ends the group."""

from __future__ import annotations

import anyio
import pytest

from fleetbus.concurrency.task_pool import KEPT_TASKS, TaskPool

pytestmark = pytest.mark.anyio


async def test_calls_that_follow_each_other_run_in_one_task() -> None:
    tasks = []
    async with anyio.create_task_group() as group:
        pool = TaskPool(group)

        async def note(done: anyio.Event) -> None:
            tasks.append(anyio.get_current_task().id)
            done.set()

        for _ in range(10):
            done = anyio.Event()
            pool.start_soon(note, done)
            await done.wait()
            await anyio.wait_all_tasks_blocked()
        group.cancel_scope.cancel()
    assert len(tasks) == 10
    assert len(set(tasks)) == 1


async def test_calls_at_a_time_have_a_task_each_and_few_are_kept() -> None:
    async with anyio.create_task_group() as group:
        pool = TaskPool(group)
        go_on, running = anyio.Event(), 0

        async def wait() -> None:
            nonlocal running
            running += 1
            await go_on.wait()

        for _ in range(3 * KEPT_TASKS):
            pool.start_soon(wait)
        await anyio.wait_all_tasks_blocked()
        assert running == 3 * KEPT_TASKS
        go_on.set()
        await anyio.wait_all_tasks_blocked()
        assert pool.waiting == KEPT_TASKS
        group.cancel_scope.cancel()


async def test_an_exception_of_a_call_ends_the_group_also_in_a_task_used_before() -> None:
    async def fail(wanted: bool) -> None:
        if wanted:
            raise ValueError("as planned")

    with pytest.raises(ExceptionGroup) as caught:
        async with anyio.create_task_group() as group:
            pool = TaskPool(group)
            pool.start_soon(fail, False)
            await anyio.wait_all_tasks_blocked()
            pool.start_soon(fail, True)
            await anyio.sleep_forever()
    assert caught.group_contains(ValueError, match="as planned")
