"""The client for callers in threads, or on loops of their own: one connection per run, on one loop that all of them share.

A connection belongs to the loop that made it, so callers never make one per call: they hand their calls over to this loop.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import CancelledError, Future
from contextlib import AbstractContextManager, ExitStack, asynccontextmanager
from functools import partial
from typing import Any, TypeVar

from anyio.from_thread import BlockingPortal, start_blocking_portal

from fleetbus.auth.access import build_access
from fleetbus.bus.nats import connect
from fleetbus.client.sessions import Session, SessionClient, sessions
from fleetbus.errors import BusClosed
from fleetbus_schemas import Subjects

T = TypeVar("T")

AUTH_VARIABLE = "FLEETBUS_NATS_AUTH"
"""As for all commands: the folder that `fleetbus auth init` wrote."""

INTERRUPTED_SECONDS = 5.0

ENDED_MEANWHILE = "the connection was closed during the call"

_lock = threading.Lock()
_open: dict[tuple[str, str], SharedClient] = {}


class SharedClient:
    """One run's client on its loop."""

    def __init__(self, portal: BlockingPortal, client: SessionClient) -> None:
        self._loop = portal.call(asyncio.get_running_loop)
        self._client = client

    def session(self, *, timeout: float) -> Session:
        """A session with a name of its own that is not open yet."""
        return self._client.session(timeout=timeout)

    def call(self, function: Callable[..., Awaitable[T]], *args: Any) -> T:
        """Run a coroutine function on the loop and wait for it, in a thread that has no loop running. Interrupted, as by
        Ctrl-C, it cancels the call, and leaves it `INTERRUPTED_SECONDS` to release what it holds, also where the loop is held
        up. Raises `BusClosed` if that has ended, or ends meanwhile."""
        ended = threading.Event()

        async def run() -> T:
            try:
                return await function(*args)
            finally:
                ended.set()

        running = _start(run, self._loop)
        try:
            return running.result()
        except CancelledError:
            raise BusClosed(ENDED_MEANWHILE) from None
        finally:
            if running.cancel():  # else it is over
                ended.wait(INTERRUPTED_SECONDS)

    async def wait(self, function: Callable[..., Awaitable[T]], *args: Any) -> T:
        """The same, awaited on an asyncio loop, which it never holds up. Cancelling it cancels the call."""
        return await wait_on_loop(self._loop, function, *args)


async def wait_on_loop(loop: asyncio.AbstractEventLoop, function: Callable[..., Awaitable[T]], *args: Any) -> T:
    """Run a coroutine function on the loop of another thread. Cancelling it cancels the call. Raises `BusClosed` if that loop
    has ended, or ends meanwhile."""
    called = _start(partial(function, *args), loop)
    try:
        return await asyncio.wrap_future(called)
    except asyncio.CancelledError:
        if (caller := asyncio.current_task()) is None or caller.cancelling():
            raise
        raise BusClosed(ENDED_MEANWHILE) from None


def _start(function: Callable[[], Awaitable[T]], loop: asyncio.AbstractEventLoop) -> Future[T]:
    """Start a call on the loop of another thread: with a portal's own way the caller would stand still until that loop has its
    turn, and one that gave up before could not cancel the call."""

    async def call() -> T:
        return await function()

    calling = call()
    try:
        return asyncio.run_coroutine_threadsafe(calling, loop)
    except RuntimeError:  # the loop is closed
        calling.close()
        raise BusClosed("the connection is closed") from None


def get_shared_client(url: str, run: str) -> SharedClient:
    """The client of this process for a run, made on first use and closed when the process ends. A forked one makes its own."""
    with _lock:
        if (url, run) not in _open:
            _open[url, run] = _connect(url, run)
        return _open[url, run]


def _forget_parent() -> None:
    """A forked process has no thread of its parent's loop: a call to that would wait for ever."""
    global _lock
    _lock = threading.Lock()
    _open.clear()


os.register_at_fork(after_in_child=_forget_parent)


def _connect(url: str, run: str) -> SharedClient:
    with ExitStack() as stack:
        portal = stack.enter_context(start_blocking_portal("asyncio", backend_options={"use_uvloop": True}))
        stack.callback(portal.call, portal.stop, True)  # the end of the process waits for no call
        client = stack.enter_context(open_client(portal, url, run))
        atexit.register(stack.pop_all().close)
    return SharedClient(portal, client)


def open_client(portal: BlockingPortal, url: str, run: str) -> AbstractContextManager[SessionClient]:
    """A client on the portal's loop; where the server wants a key, that of a gateway out of the folder `AUTH_VARIABLE`. Raises
    `UserError` if no server answers, or has no such run."""
    access = build_access("gateway", os.environ.get(AUTH_VARIABLE, ""), run)

    @asynccontextmanager
    async def open_session_client() -> Any:
        async with connect(url, run=run, role="gateway", worker="client", **access) as bus:
            await bus.check_log()
            async with sessions(bus, Subjects(run)) as client:
                yield client

    return portal.wrap_async_context_manager(open_session_client())
