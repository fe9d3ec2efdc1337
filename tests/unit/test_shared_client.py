"""The connection that a process shares: a process that was forked from it makes its own."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any, cast

import anyio
import pytest
from anyio.from_thread import start_blocking_portal

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
child.join(10)
child.kill()
sys.exit(child.exitcode if child.exitcode is not None else "the call of the forked process did not end")
"""


def test_a_forked_process_calls_on_a_loop_of_its_own() -> None:
    ended = subprocess.run([sys.executable, "-W", "ignore", "-c", PROGRAM], capture_output=True, text=True, timeout=30)
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


def test_an_interrupted_call_is_cancelled_and_may_release_what_it_holds(
    client: SharedClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by Ctrl-C in the middle of a trainer's batch: else a session that is being opened stays open."""
    began, events, start = threading.Event(), [], client._portal.start_task_soon

    async def hold() -> None:
        began.set()
        try:
            await anyio.sleep_forever()
        finally:
            with anyio.CancelScope(shield=True):
                await anyio.sleep(0.05)
                events.append("released")

    def interrupt() -> None:
        began.wait()
        raise KeyboardInterrupt

    def start_to_be_interrupted(function: Any) -> Any:
        running = start(function)
        monkeypatch.setattr(running, "result", interrupt)
        return running

    monkeypatch.setattr(client._portal, "start_task_soon", start_to_be_interrupted)
    with pytest.raises(KeyboardInterrupt):
        client.call(hold)
    assert events == ["released"]


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
    subprocess.run([sys.executable, "-W", "ignore", "-c", LEFT_CALL], capture_output=True, timeout=20, check=True)
