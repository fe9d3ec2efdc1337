"""Reports a blocked event loop of an environment worker: which class, at which line, while it lasts.

The loop cannot send heartbeats then, so the thread that watches it sends them, over a connection of its own.
"""

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from types import FrameType

import anyio
import structlog

from fleetbus.bus.base import Bus
from fleetbus_schemas import Heartbeat, Subjects, encode
from fleetbus_workers.environment.failure_location import locate_frame

SEND_SECONDS = 1.0

log = structlog.get_logger()


class BlockedLoopReport:
    """The report that `blocked_loop.watch_blocked_loop` calls. ``connect`` makes a connection for the thread that calls it."""

    def __init__(
        self, connect: Callable[[], AbstractAsyncContextManager[Bus]], subjects: Subjects, *, worker: str, slots: int
    ) -> None:
        self._connect = connect
        self._subjects = subjects
        self._worker = worker
        self._slots = slots

    def __call__(self, frame: FrameType | None, seconds: float) -> None:
        """Log it; and say it to the run if it is the code of an environment that blocks."""
        location = locate_frame(frame)
        log.error("the event loop is blocked", seconds=round(seconds, 1), location=location or _format_frame(frame))
        if not location:
            return
        problem = (
            f"blocked at {location}: an async function that does not await stops the whole worker; "
            "make it an ordinary function, which runs in a thread"
        )
        try:
            anyio.run(self._send, problem)
        except Exception as error:  # noqa: BLE001 - a report must not end the thread that makes the next one
            log.warning("the blocked event loop was not reported", reason=str(error))

    async def _send(self, problem: str) -> None:
        beat = Heartbeat(role="environment", worker=self._worker, slots=self._slots, problem=problem)
        with anyio.move_on_after(SEND_SECONDS):
            async with self._connect() as bus:
                await bus.broadcast(self._subjects.heartbeat("environment", self._worker), encode(beat))


def _format_frame(frame: FrameType | None) -> str:
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_qualname}" if frame is not None else "unknown"
