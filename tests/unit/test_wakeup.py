"""One task that waits again and again: no wake-up is lost, whoever comes first, and a cancelled wait leaves nothing behind."""

from __future__ import annotations

import anyio
import pytest

from fleetbus.concurrency.wakeup import Wakeup

pytestmark = pytest.mark.anyio


async def test_who_waits_is_woken_and_waits_anew_once_it_is_cleared() -> None:
    wakeup, woken = Wakeup(), 0

    async def wait() -> None:
        nonlocal woken
        for _ in range(3):
            await wakeup.wait()
            wakeup.clear()
            woken += 1

    with anyio.fail_after(5):
        async with anyio.create_task_group() as group:
            group.start_soon(wait)
            for wanted in (1, 2, 3):
                await anyio.wait_all_tasks_blocked()
                wakeup.set()
                wakeup.set()
                await anyio.wait_all_tasks_blocked()
                assert woken == wanted


async def test_what_is_set_before_the_wait_is_not_lost() -> None:
    wakeup = Wakeup()
    wakeup.set()
    with anyio.fail_after(5):
        await wakeup.wait()
    assert wakeup.is_set


async def test_a_cancelled_wait_ends_and_the_next_one_is_woken() -> None:
    wakeup = Wakeup()
    with anyio.move_on_after(0.01) as scope:
        await wakeup.wait()
    assert scope.cancelled_caught
    wakeup.set()
    with anyio.fail_after(5):
        await wakeup.wait()
