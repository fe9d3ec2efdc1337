"""Waking all tasks that wait for the next change, in however many tasks they wait.

An `anyio.Event` is set once, so a task that waits repeatedly needs a new one each time. It is replaced here when
it is set, never by a waiter: a waiter that replaces it takes it away from those who wait already, and they are never woken.
"""

import anyio


class Notifier:
    """`notify` wakes all who are in `wait` at that moment. It costs nothing while no task waits."""

    def __init__(self) -> None:
        self._event: anyio.Event | None = None

    async def wait(self) -> None:
        """Until the next `notify`. Look at what is waited for first, and again afterwards; nothing may be awaited between."""
        if self._event is None:
            self._event = anyio.Event()
        await self._event.wait()

    def notify(self) -> None:
        """Something changed."""
        event, self._event = self._event, None
        if event is not None:
            event.set()
