"""Calls of a user's class that never end keep a bounded number of threads, and the log names each method once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import partial

import anyio
import pytest
from structlog.testing import capture_logs

from fleetbus_workers.environment.adapters.common import call_threads
from fleetbus_workers.environment.adapters.common.call_threads import CallThreads, SerialCalls
from fleetbus_workers.environment.base import EnvironmentFailed


class Shop:
    """Of whose methods some never end."""


@pytest.fixture
def stay() -> Iterator[Callable[[], object]]:
    released = threading.Event()
    yield partial(released.wait, 60)
    released.set()


async def give_up(calls: SerialCalls, function: Callable[[], object], name: str) -> None:
    begun = anyio.Event()

    def run() -> object:
        anyio.from_thread.run_sync(begun.set)
        return function()

    async with anyio.create_task_group() as group:
        group.start_soon(calls.run, run, name)
        await begun.wait()
        group.cancel_scope.cancel()


async def test_of_calls_that_never_end_no_more_are_begun_than_there_may_be_threads_until_one_ends(
    monkeypatch: pytest.MonkeyPatch, stay: Callable[[], object]
) -> None:
    """Each left its thread, without any bound and unsaid."""
    monkeypatch.setattr(call_threads, "MOST_LEFT", 3)
    threads, one = CallThreads(), threading.Event()
    with capture_logs() as said:
        await give_up(SerialCalls(threads, Shop), partial(one.wait, 60), "sell")
        for _ in range(2):
            await give_up(SerialCalls(threads, Shop), stay, "buy")
        with pytest.raises(EnvironmentFailed, match=r"3 calls .* still run .* of Shop.buy, Shop.sell: "):
            await SerialCalls(threads, Shop).run(str, "look")
    assert [each["call"] for each in said] == ["Shop.sell", "Shop.buy"]
    one.set()
    with anyio.fail_after(60):
        while True:
            try:
                assert await SerialCalls(threads, Shop).run(str, "look") == ""
                break
            except EnvironmentFailed:
                await anyio.sleep(0.01)


async def test_the_next_call_of_an_object_waits_for_one_that_was_given_up_without_a_thread_of_its_own(
    stay: Callable[[], object],
) -> None:
    threads, ended = CallThreads(), threading.Event()
    calls, before = SerialCalls(threads, Shop), threading.active_count()
    await give_up(calls, partial(ended.wait, 60), "buy")
    with anyio.move_on_after(0.2) as scope:
        await calls.run(str, "close")
    assert scope.cancelled_caught and threading.active_count() <= before + 1
    ended.set()
    with anyio.fail_after(60):
        assert await calls.run(str, "close") == ""


async def test_calls_that_end_or_raise_are_no_more_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_threads, "MOST_LEFT", 1)
    calls = SerialCalls(CallThreads(anyio.CapacityLimiter(1)), Shop)
    with capture_logs() as said:
        for _ in range(3):
            assert await calls.run(partial(int, "5"), "count") == 5
            with pytest.raises(ValueError):
                await calls.run(partial(int, "five"), "count")
    assert not said
