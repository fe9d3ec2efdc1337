"""`anyio.Lock` for what is taken with each step and hardly ever waited for: while it is free, nothing is asked of the loop."""

from collections import deque

import anyio


class QuickLock:
    """Those who wait get it in order of arrival; it is given from hand to hand, so that nobody comes in between. Whoever has it
    is not remembered: a task that takes it twice waits for itself."""

    __slots__ = ("_is_held", "_waiting")

    def __init__(self) -> None:
        self._is_held = False
        self._waiting: deque[anyio.Event] = deque()

    def locked(self) -> bool:
        return self._is_held

    async def __aenter__(self) -> None:
        if not self._is_held:
            self._is_held = True
            return
        given = anyio.Event()
        self._waiting.append(given)
        try:
            await given.wait()
        except BaseException:
            if given.is_set():  # it was given to a task that was cancelled meanwhile
                self._release()
            else:
                self._waiting.remove(given)
            raise

    async def __aexit__(self, *_: object) -> None:
        self._release()

    def _release(self) -> None:
        if self._waiting:
            self._waiting.popleft().set()
        else:
            self._is_held = False
