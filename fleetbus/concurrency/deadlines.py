"""Time limits of many tasks under one timer: a task that is limited over and over enters one scope, and moves its deadline.

`anyio.move_on_after` costs a scope and a timer each time, more than most of what it limits. Here a limit is a number that a
task writes down and clears; one task for all of them sleeps until the earliest, and cancels the scope of whoever is late.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from types import TracebackType
from typing import Protocol

import anyio

from fleetbus.concurrency.loop_clock import get_clock
from fleetbus.concurrency.notifier import Notifier


class Timed(Protocol):
    """Something that is called when its time has come. ``at``: when, by the loop's clock; once called, it has to move that."""

    at: float

    def pass_by(self) -> None: ...


class Deadline:
    """The limits of one task, one after another, within `Deadlines.open`. What is late is cancelled for good."""

    __slots__ = ("_deadlines", "_end", "_scope", "at", "is_cancelled", "is_over", "is_whole_over")

    def __init__(self, deadlines: Deadlines, end: float) -> None:
        self._deadlines = deadlines
        self._end = self.at = end
        self._scope = anyio.CancelScope()
        self.is_over = False
        """Whether a limit has passed: then everything in the scope is cancelled."""
        self.is_whole_over = False
        """Whether it was that of the whole."""
        self.is_cancelled = False
        """Whether `cancel` was called."""

    def __enter__(self) -> Deadline:
        self._deadlines.add(self)
        self._scope.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> bool:
        self._deadlines.remove(self)
        return bool(self._scope.__exit__(kind, error, trace))

    @property
    def now(self) -> Callable[[], float]:
        """The loop's clock."""
        return self._deadlines.now

    @property
    def cancel_called(self) -> bool:
        """As of a scope."""
        return self._scope.cancel_called

    @property
    def cancelled_caught(self) -> bool:
        """As of a scope."""
        return self._scope.cancelled_caught

    def move(self, at: float) -> None:
        """Cancel what runs from now on once the loop's clock says ``at``, or at the end of the whole if that is earlier."""
        self.at = min(at, self._end)
        if self.at < self._deadlines.wakes_at:
            self._deadlines.wake_at(self.at)

    def clear(self) -> None:
        """Only the limit of the whole remains."""
        self.at = self._end

    def cancel(self) -> None:
        """Cancel everything in the scope now, or as soon as it is entered, though no limit has passed."""
        self.is_cancelled = True
        self._scope.cancel()

    def pass_by(self) -> None:
        """The time of the limit that holds now has come."""
        self.is_over, self.is_whole_over = True, self.at == self._end
        self._end = self.at = math.inf
        self._scope.cancel()


class Deadlines:
    """The deadlines of one worker; `run` has to run beside those who use them."""

    def __init__(self) -> None:
        self._open: set[Timed] = set()
        self.wakes_at = math.inf
        self._earlier = Notifier()
        self.now = get_clock()
        """The loop's clock."""

    def open(self, end: float = math.inf) -> Deadline:
        """A scope for the length of a ``with`` block, which ends at ``end`` (of the loop's clock) or at a limit within it."""
        return Deadline(self, end)

    def add(self, timed: Timed) -> None:
        """Tell it when its time has come, until it is removed."""
        self._open.add(timed)
        if timed.at < self.wakes_at:
            self.wake_at(timed.at)

    def remove(self, timed: Timed) -> None:
        self._open.remove(timed)

    def wake_at(self, at: float) -> None:
        """There is a deadline before that for which the timer waits."""
        self.wakes_at = at
        self._earlier.notify()

    async def run(self) -> None:
        """Cancel what is late until cancelled."""
        now = self.now
        while True:
            self.wakes_at = min((each.at for each in self._open), default=math.inf)
            if self.wakes_at > now():
                with anyio.move_on_after(self.wakes_at - now()):
                    await self._earlier.wait()
                continue
            for timed in [each for each in self._open if each.at <= now()]:
                timed.pass_by()
