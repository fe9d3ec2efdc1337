"""Turns that are sampled and wait for the one before them: each leaves its slot, which that one may need.

Where all slots were kept by turns that wait, those that they wait for would find none: after a worker was killed, a fleet would
stand still (docs/decisions/0268-turns-side-by-side.md).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import anyio
import structlog
from anyio.abc import TaskGroup

from fleetbus.concurrency.notifier import Notifier
from fleetbus.concurrency.task_groups import open_first_error_task_group
from fleetbus.errors import BusClosed, BusError

MOST_WAITING = 1024
"""Turns that wait outside the slots; a further one keeps its slot: each holds its answer."""

log = structlog.get_logger()


class WaitingTurns:
    """Runs turns in tasks of its own, of which a slot waits for as long as they need it. `run` has to run beside it."""

    def __init__(self, most: int = MOST_WAITING) -> None:
        self._most = most
        self._tasks: TaskGroup | None = None
        self._running = anyio.Event()
        self._in_slots: dict[str, anyio.Event] = {}
        self._outside: set[str] = set()
        self._ended = Notifier()

    async def run(self) -> None:
        """Run what is started until cancelled. Raises what a turn raises, but for failures of the bus that pass."""
        async with open_first_error_task_group() as self._tasks:
            self._running.set()
            await anyio.sleep_forever()

    async def start(self, turn: str, work: Callable[..., Awaitable[None]], *arguments: object) -> None:
        """Run ``work``; returns when it has ended or has left its slot."""
        await self._running.wait()
        assert self._tasks is not None
        left = self._in_slots[turn] = anyio.Event()
        self._tasks.start_soon(self._run_turn, turn, work, arguments)
        await left.wait()

    def leave_slot(self, turn: str) -> bool:
        """The turn needs its slot no more; False if it keeps it: it was not started here, or too many others wait outside."""
        if turn in self._outside:
            return True
        if turn not in self._in_slots or len(self._outside) >= self._most:
            return False
        self._outside.add(turn)
        self._in_slots.pop(turn).set()
        return True

    async def wait_until_idle(self) -> None:
        """Return when none is outside the slots."""
        while self._outside:
            await self._ended.wait()

    async def _run_turn(self, turn: str, work: Callable[..., Awaitable[None]], arguments: tuple[object, ...]) -> None:
        try:
            await work(*arguments)
        except BusClosed:
            raise
        except BusError as error:
            log.warning("turn failed; leaving the message to redelivery", turn=turn, reason=str(error))
        finally:
            self._outside.discard(turn)
            if (left := self._in_slots.pop(turn, None)) is not None:
                left.set()
            self._ended.notify()
