"""The connection that a process shares: a process that was forked from it makes its own."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any, cast

import anyio
import pytest
from anyio.from_thread import start_blocking_portal

from fleetbus.client import blocking
from fleetbus.client.blocking import SharedClient
from fleetbus.errors import BusClosed

PROGRAM = """
import multiprocessing, os, sys
from contextlib import contextmanager
from fleetbus.client import blocking

@contextmanager
def open_client(portal, url, run):
    yield portal

async def find_process():
    return os.getpid()

def call():
    sys.exit(blocking.get_shared_client("u", "r").call(find_process) != os.getpid())

blocking.open_client = open_client
blocking.get_shared_client("u", "r")
child = multiprocessing.get_context("fork").Process(target=call)
child.start()
child.join(60)
child.kill()
sys.exit(child.exitcode if child.exitcode is not None else "the call of the forked process did not end")
"""


def test_a_forked_process_calls_on_a_loop_of_its_own() -> None:
    ended = subprocess.run([sys.executable, "-W", "ignore", "-c", PROGRAM], capture_output=True, text=True, timeout=120)
    assert (ended.returncode, ended.stderr) == (0, "")


@pytest.fixture
def client() -> Iterator[SharedClient]:
    with start_blocking_portal("asyncio") as portal:
        yield SharedClient(portal, cast("Any", None))


def test_the_callers_loop_goes_on_while_the_shared_one_is_busy(client: SharedClient) -> None:
    """A trainer's engines are on the caller's loop, and thousands of episodes keep the shared one busy."""
    released = threading.Event()

    async def hold_up() -> bool:
        return released.wait(5)

    async def echo() -> str:
        return "answer"

    async def call() -> tuple[bool, str]:
        held, echoed = asyncio.ensure_future(client.wait(hold_up)), asyncio.ensure_future(client.wait(echo))
        await asyncio.sleep(0)
        await asyncio.sleep(0)  # by now both have been started
        released.set()
        return await held, await echoed

    assert asyncio.run(call()) == (True, "answer")


def test_a_call_that_is_cancelled_is_cancelled_on_the_shared_loop(client: SharedClient) -> None:
    began, cancelled = threading.Event(), threading.Event()

    async def stay() -> None:
        began.set()
        try:
            await anyio.sleep_forever()
        finally:
            cancelled.set()

    async def call() -> None:
        calling = asyncio.ensure_future(client.wait(stay))
        await asyncio.to_thread(began.wait, 5)
        calling.cancel()
        with pytest.raises(asyncio.CancelledError):
            await calling

    asyncio.run(call())
    assert cancelled.wait(5)


def test_a_calls_error_is_the_callers(client: SharedClient) -> None:
    async def fail() -> None:
        raise LookupError("no such session")

    with pytest.raises(LookupError, match="no such session"):
        asyncio.run(client.wait(fail))


def test_a_call_that_the_shared_loop_ends_has_failed_and_was_not_cancelled() -> None:
    """A task group takes a task that was cancelled for one that it need not tell of."""

    async def call() -> None:
        began, portals = threading.Event(), ExitStack()
        portal = portals.enter_context(start_blocking_portal("asyncio"))

        async def stay() -> None:
            began.set()
            await anyio.sleep_forever()

        async with asyncio.TaskGroup() as group:
            group.create_task(SharedClient(portal, cast("Any", None)).wait(stay))
            await asyncio.to_thread(began.wait, 5)
            await asyncio.to_thread(portals.close)

    with pytest.raises(ExceptionGroup) as failed:
        asyncio.run(call())
    assert failed.group_contains(BusClosed)


def test_a_call_on_a_shared_loop_that_has_ended_says_that_it_is_closed() -> None:
    async def answer() -> None: ...

    with start_blocking_portal("asyncio") as portal:
        client = SharedClient(portal, cast("Any", None))
    with pytest.raises(BusClosed, match="the connection is closed"):
        asyncio.run(client.wait(answer))
    with pytest.raises(BusClosed, match="the connection is closed"):
        client.call(answer)


@pytest.fixture
def interrupt_soon(monkeypatch: pytest.MonkeyPatch, interruptible: None) -> Callable[[], None]:
    """Interrupts the main thread a little after it has started a call."""
    started, start, main = threading.Event(), blocking._start, threading.main_thread().ident
    assert main is not None

    def start_and_tell(*arguments: Any) -> Any:
        running = start(*arguments)
        started.set()
        return running

    def interrupt() -> None:
        started.wait(60)
        time.sleep(0.2)
        signal.pthread_kill(main, signal.SIGINT)

    monkeypatch.setattr(blocking, "_start", start_and_tell)
    return threading.Thread(target=interrupt).start


def test_an_interrupted_call_is_cancelled_and_may_release_what_it_holds(
    client: SharedClient, interrupt_soon: Callable[[], None]
) -> None:
    """As by Ctrl-C in the middle of a trainer's batch: else a session that is being opened stays open."""
    events: list[str] = []

    async def hold() -> None:
        interrupt_soon()
        try:
            await anyio.sleep_forever()
        finally:
            with anyio.CancelScope(shield=True):
                await anyio.sleep(0.05)
                events.append("released")

    with pytest.raises(KeyboardInterrupt):
        client.call(hold)
    assert events == ["released"]


@pytest.mark.parametrize("has_begun", [True, False])
def test_an_interrupted_call_ends_in_time_while_the_shared_loop_is_held_up_and_is_cancelled_once_it_goes_on(
    client: SharedClient, monkeypatch: pytest.MonkeyPatch, interrupt_soon: Callable[[], None], has_begun: bool
) -> None:
    """One that was to begin began afterwards, and a session that nobody knew of was opened."""
    monkeypatch.setattr(blocking, "INTERRUPTED_SECONDS", 0.1)
    released, events = threading.Event(), list[str]()

    async def hold_up() -> None:
        interrupt_soon()
        released.wait(60)

    async def open_session() -> None:
        events.append("begun")
        if has_begun:
            holding = asyncio.ensure_future(hold_up())
        try:
            await anyio.sleep_forever()
        finally:
            events.append("ended")
            assert not has_begun or holding.done()

    async def do_nothing() -> None: ...

    if not has_begun:
        asyncio.run_coroutine_threadsafe(hold_up(), client._loop)
    with pytest.raises(KeyboardInterrupt):
        client.call(open_session)
    assert not released.is_set() and "ended" not in events
    released.set()
    client.call(do_nothing)
    assert events in (["begun", "ended"], [])


LEFT_CALL = """
import anyio, threading
from contextlib import contextmanager
from fleetbus.client import blocking

@contextmanager
def open_client(portal, url, run):
    yield portal

blocking.open_client = open_client
client, began = blocking.get_shared_client("u", "r"), threading.Event()

async def stay():
    began.set()
    await anyio.sleep_forever()

threading.Thread(target=client.call, args=(stay,), daemon=True).start()
began.wait()
"""


def test_the_end_of_a_process_waits_for_no_call() -> None:
    subprocess.run([sys.executable, "-W", "ignore", "-c", LEFT_CALL], capture_output=True, timeout=120, check=True)
