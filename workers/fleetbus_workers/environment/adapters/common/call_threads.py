"""Threads for calls of a user's class. One that is given up keeps its thread until it ends: they are counted, and named."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

import anyio
import anyio.to_thread
import structlog

from fleetbus_workers.environment.base import EnvironmentFailed

T = TypeVar("T")

MOST_LEFT = 1024
"""Calls that were given up and still run: beyond, none is begun, for each has a thread that nothing can end."""

POLL_SECONDS = 0.05
"""Between looks for the end of a call that was given up."""

log = structlog.get_logger(__name__)


class CallThreads:
    """The threads of one kind's objects. anyio's ``limiter`` counts a call until it is given up, and not longer."""

    def __init__(self, limiter: anyio.CapacityLimiter | None = None) -> None:
        self._limiter = limiter
        self._left: dict[object, str] = {}
        self._said: set[str] = set()

    async def run(self, function: Callable[[], T], name: str) -> T:
        """Call it in a thread; ``name`` is what the log calls it if it is given up. Raises `EnvironmentFailed` if too many of
        those still run."""
        if len(self._left) >= MOST_LEFT:
            names = ", ".join(sorted(set(self._left.values())))
            raise EnvironmentFailed(
                f"{MOST_LEFT} calls that were given up still run and keep their threads, of {names}: give what they wait for a "
                "time limit, or start the worker again"
            )
        begun, ended, call = threading.Event(), threading.Event(), object()

        def run() -> T:
            begun.set()
            try:
                return function()
            finally:
                ended.set()
                self._left.pop(call, None)

        try:
            return await anyio.to_thread.run_sync(run, abandon_on_cancel=True, limiter=self._limiter)
        finally:
            if begun.is_set() and not ended.is_set():
                self._left[call] = name
                if ended.is_set():  # meanwhile
                    self._left.pop(call, None)
                elif name not in self._said:
                    self._said.add(name)
                    log.warning("call was given up; it keeps its thread until it ends", call=name)


class SerialCalls:
    """The calls of one object in threads, one after another: the next waits for the end of one that was given up."""

    def __init__(self, threads: CallThreads, kind: object) -> None:
        self._threads = threads
        self._kind = getattr(kind, "__qualname__", type(kind).__name__)
        self._lock = threading.Lock()

    async def run(self, function: Callable[[], T], name: str) -> T:
        """See `CallThreads.run`."""
        while self._lock.locked():  # noqa: ASYNC110 - held by a call that was given up: one more thread would wait for it
            await anyio.sleep(POLL_SECONDS)

        def call() -> T:
            with self._lock:
                return function()

        return await self._threads.run(call, f"{self._kind}.{name}")
