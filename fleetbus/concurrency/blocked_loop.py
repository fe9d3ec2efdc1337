"""A thread that notices when the event loop of its process stands still, and says at which line of code.

Code that blocks (`time.sleep`, a synchronous request, a long loop) in a coroutine stops a whole worker, heartbeats included: to
everybody else it looks dead. The thread sees it while it lasts, unless the code holds the interpreter lock.
"""

import sys
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from types import FrameType

import anyio

BLOCKED_SECONDS = 2.0
"""A loop that has not run for this long is blocked."""

REPEAT_SECONDS = 1.5
"""Between two reports of the same blockage; less than what makes a worker count as silent."""

_CHECK_SECONDS = 0.25

Report = Callable[[FrameType | None, float], None]
"""Called in the thread with the innermost frame of the loop's thread, and for how many seconds it has stood still."""


@asynccontextmanager
async def watch_blocked_loop(report: Report) -> AsyncIterator[None]:
    """Watch the loop that runs this, until the body ends. ``report`` is repeated while the loop stands still."""
    watch = _Watch(report, threading.get_ident())
    thread = threading.Thread(target=watch.run, name="blocked-loop", daemon=True)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(watch.beat)
        thread.start()
        try:
            yield
        finally:
            watch.stop()
            tasks.cancel_scope.cancel()


class _Watch:
    def __init__(self, report: Report, thread_id: int) -> None:
        self._report = report
        self._thread_id = thread_id
        self._beaten_at = time.monotonic()
        self._stopped = threading.Event()

    async def beat(self) -> None:
        while True:
            self._beaten_at = time.monotonic()
            await anyio.sleep(_CHECK_SECONDS)

    def stop(self) -> None:
        """End the thread soon; it is not waited for, because it may be in the middle of a report."""
        self._stopped.set()

    def run(self) -> None:
        reported_at = 0.0
        checked_at = time.monotonic()
        while not self._stopped.wait(_CHECK_SECONDS):
            now = time.monotonic()
            was_suspended, checked_at = now - checked_at > BLOCKED_SECONDS / 2, now
            if was_suspended:  # the whole process stood still, or this thread did: the loop had no chance either
                self._beaten_at = max(self._beaten_at, now - BLOCKED_SECONDS / 2)
            blocked = now - self._beaten_at
            if blocked >= BLOCKED_SECONDS and now - reported_at >= REPEAT_SECONDS:
                reported_at = now
                self._report(sys._current_frames().get(self._thread_id), blocked)
